"""The page for Prometheus: which figures each event changes."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.metadata.wire.membership import Heartbeat
from baton.metadata.wire.messages import Admitted, PrefillDone
from baton.metadata.wire.node_info import Load, NodeStats, RankLoad
from baton.metadata.wire.request import Unit
from baton.router.figures.metrics import INTERVAL_S, Metrics, MoveReason
from baton.router.nodes.node_history import Loss

from ..hellos import ClockedRegistry
from ..sites import add_node, make_group, make_request

GROUP = make_group()
LOAD = Load(free_pages=6, running=2, waiting=1, tickets=3, queued_tokens=44, prompt_token_s=0.25, round_s=0.5)
LOSSES: tuple[Loss, ...] = ("closed", "dead")


class Page:
    """The metrics page, read once."""

    def __init__(self, metrics: Metrics) -> None:
        families = list(text_string_to_metric_families(metrics.page().decode()))
        self.samples = [sample for family in families for sample in family.samples]

    def get(self, name: str, **labels: str) -> float | None:
        """Return the value of the one sample that has these labels, None if there is none."""
        found = [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]
        assert len(found) < 2, (name, labels, found)
        return found[0] if found else None

    def histogram(self, name: str) -> tuple[float | None, float | None]:
        """Return count and sum."""
        return self.get(f"{name}_count"), self.get(f"{name}_sum")

    def le(self, name: str) -> dict[float, float]:
        """Return the cumulative counts of the buckets by their bounds."""
        return {float(each.labels["le"]): each.value for each in self.samples if each.name == f"{name}_bucket"}


class Output:
    """A request whose sequences receive tokens, recorded as the streams record them."""

    def __init__(self, created_at: float, num_choices: int = 1) -> None:
        self.metrics = Metrics()
        self.request = make_request(GROUP, num_choices=num_choices, now=created_at)

    def tokens(self, num_tokens: int, now: float, choice: int = 0) -> None:
        sequence = self.request.sequences[choice]
        self.metrics.tokens(self.request, sequence, num_tokens, now)
        sequence.seen_at = now
        self.request.first_token_at = self.request.first_token_at or now


def test_the_time_to_first_token_is_taken_once_per_request() -> None:
    output = Output(created_at=10.0, num_choices=2)
    output.tokens(1, 10.2)
    output.tokens(1, 10.4, choice=1)
    output.tokens(1, 10.6)
    page = Page(output.metrics)
    assert page.histogram("baton_ttft_seconds") == (1, pytest.approx(0.2))
    assert page.get("baton_ttft_seconds_count", model="fake") == 1


def test_tokens_that_come_together_are_intervals_of_equal_length() -> None:
    output = Output(created_at=0.0)
    output.tokens(3, 1.0)  # the first ones follow no token
    output.tokens(4, 1.032)  # 4 times 8 ms
    output.tokens(1, 1.052)  # once 20 ms, exactly a bound
    output.tokens(1, 5.0)  # beyond all bounds
    page = Page(output.metrics)
    assert page.get("baton_output_tokens_total", model="fake") == 9
    assert page.histogram("baton_itl_seconds") == (6, pytest.approx(4.0))
    buckets = page.le("baton_itl_seconds")
    assert len(buckets) == len(INTERVAL_S) + 1
    assert [buckets[bound] for bound in (0.0075, 0.01, 0.015, 0.03, 2.5, float("inf"))] == [0, 4, 4, 5, 5, 6]


def test_an_interval_belongs_to_the_bucket_of_its_bound() -> None:
    output = Output(created_at=0.0)
    output.tokens(1, 1.0)
    output.tokens(2, 1.5)  # twice 0.25 s
    output.tokens(1, 2.0)  # once 0.5 s
    buckets = Page(output.metrics).le("baton_itl_seconds")
    assert [buckets[bound] for bound in (0.2, 0.5, 1.0)] == [0, 3, 3]


def test_each_choice_has_its_own_intervals() -> None:
    output = Output(created_at=0.0, num_choices=2)
    for choice, now in ((0, 1.0), (1, 2.0), (0, 3.0), (1, 5.0)):
        output.tokens(1, now, choice)
    assert Page(output.metrics).histogram("baton_itl_seconds") == (2, pytest.approx(5.0))


def test_an_end_without_tokens_is_no_interval() -> None:
    output = Output(created_at=0.0)
    output.tokens(1, 1.0)
    output.tokens(0, 9.0)
    page = Page(output.metrics)
    assert (page.get("baton_output_tokens_total"), page.histogram("baton_itl_seconds")) == (1, (None, None))


def test_moves_are_counted_by_their_reason() -> None:
    metrics, request = Metrics(), make_request(GROUP)
    reasons: list[MoveReason] = ["lost", "failed", "lost", "drained"]
    for reason in reasons:
        metrics.moved(request, reason)
    page = Page(metrics)
    counts = {reason: page.get("baton_moved_requests_total", model="fake", reason=reason) for reason in reasons}
    assert counts == {"lost": 2, "failed": 1, "drained": 1}


def test_the_end_of_a_request() -> None:
    metrics, request = Metrics(), make_request(GROUP, prompt_len=40, now=10.0)
    request.num_cached = 16
    metrics.dispatched(request, 10.5)
    metrics.done(request, 13.0)
    metrics.done(make_request(GROUP, prompt_len=2, now=12.0), 13.0)  # no node told how much of it was cached
    metrics.count_request("fake", "refused")
    for status in (200, 404, 200):
        metrics.count_http(status)
    page = Page(metrics)
    assert page.histogram("baton_queue_seconds") == (1, 0.5)
    assert page.histogram("baton_e2e_seconds") == (2, 4.0)
    assert (page.get("baton_prompt_tokens_total"), page.get("baton_cached_tokens_total")) == (42, 16)
    outcomes = [page.get("baton_requests_total", model="fake", outcome=each) for each in ("done", "refused")]
    assert outcomes == [2, 1]
    assert [page.get("baton_http_responses_total", status=each) for each in ("200", "404")] == [2, 1]


def test_the_handoff_of_a_prompt() -> None:
    metrics, prefill, decode = Metrics(), add_node(GROUP, "prefill", "p0"), add_node(GROUP, "decode", "d0")
    metrics.prefill(prefill, PrefillDone("r", 0, 0.25, 2.0, 16, LOAD))
    for _ in range(2):
        metrics.transfer(decode, Admitted(Unit("r", 0, 0), 0.125, 3, 3072, 1))
    page = Page(metrics)
    assert page.histogram("baton_prefill_queue_seconds") == (1, 0.25)
    assert page.histogram("baton_prefill_compute_seconds") == (1, 2.0)
    assert page.histogram("baton_transfer_seconds") == (2, 0.25)
    assert (page.get("baton_transfer_bytes_total"), page.get("baton_transfer_pages_total")) == (6144, 6)


def test_figures_of_heartbeats_appear_per_node() -> None:
    metrics, nodes = Metrics(), ClockedRegistry()
    metrics.watch_nodes(nodes.registry, lambda: 7)
    node = nodes.join("e", "d0")
    nodes.join("e", "p0", "prefill")
    node.heard(Heartbeat(1, "idle", 0.0, 10.0, LOAD, NodeStats(steps=5, num_drafted=9, accepted_at=(4, 2))), nodes.now)
    node.cordon()
    page = Page(metrics)
    assert page.get("baton_waiting_requests") == 7
    labels = {"node": "d0", "role": "decode", "model": "fake"}
    gauges = ("pages", "free_pages", "running", "waiting", "tickets", "queued_tokens", "draining")
    assert [page.get(f"baton_node_{name}", **labels) for name in gauges] == [8, 6, 2, 1, 3, 44, 1]
    times = ("prompt_token_seconds", "round_seconds")
    assert [page.get(f"baton_node_{name}", **labels) for name in times] == [0.25, 0.5]
    assert [page.get(f"baton_node_{name}_total", **labels) for name in ("steps", "num_drafted")] == [5, 9]
    accepted = [page.get("baton_node_accepted_drafts_total", position=place) for place in ("1", "2", "3")]
    assert accepted == [4, 2, None], "places in a round count from 1; the other node has none"
    assert page.get("baton_node_free_pages", node="p0", role="prefill") == 8
    assert page.get("baton_node_draining", node="p0") == 0


def test_figures_that_differ_by_rank_appear_per_rank() -> None:
    metrics, nodes = Metrics(), ClockedRegistry()
    metrics.watch_nodes(nodes.registry, lambda: 0)
    load = Load(free_pages=7, running=3, waiting=0, ranks=(RankLoad(5, 1), RankLoad(2, 2)))
    own, divided = nodes.join("e", "d0"), nodes.join("e", "p0", "prefill")
    own.heard(Heartbeat(1, "idle", 0.0, 10.0, load, NodeStats(idle_rounds=(4, 9)), (0.25,)), nodes.now)
    divided.heard(Heartbeat(1, "idle", 0.0, 10.0, LOAD, NodeStats(), (0.5, 0.75)), nodes.now)
    nodes.join("e", "d1")
    page = Page(metrics)
    names = ("free_pages", "running", "idle_rounds_total", "silent_seconds")
    found = {
        (node, rank): [page.get(f"baton_node_rank_{name}", node=node, rank=rank) for name in names]
        for node in ("d0", "p0", "d1")
        for rank in "012"
    }
    assert found.pop(("d0", "0")) == [5, 1, 4, None]
    assert found.pop(("d0", "1")) == [2, 2, 9, 0.25]
    assert [found.pop(("p0", rank))[-1] for rank in "12"] == [0.5, 0.75], "one pool, whose figures are the node's"
    assert all(value is None for values in found.values() for value in values), found
    assert page.get("baton_node_free_pages", node="d0") == 7


def test_losses_and_restarts_outlive_the_node() -> None:
    metrics, nodes = Metrics(), ClockedRegistry()
    metrics.watch_nodes(nodes.registry, lambda: 0)

    def figures() -> tuple[Any, ...]:
        page = Page(metrics)
        losses = [page.get("baton_node_losses_total", node="d0", role="decode", reason=each) for each in LOSSES]
        return page.get("baton_node_restarts_total", node="d0", role="decode"), losses

    peer = nodes.hello("first")
    assert figures() == (0, [None, None])
    nodes.registry.connection_lost(peer, nodes.now)
    assert figures() == (0, [1, None])
    assert Page(metrics).get("baton_node_pages", node="d0") is None
    second = nodes.join("second")
    assert figures() == (1, [1, None])
    nodes.registry.lose(second, "dead", nodes.now)
    assert figures() == (1, [1, 1])
