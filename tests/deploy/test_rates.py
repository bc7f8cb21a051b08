"""Rates and percentiles between snapshots, on cases computed by hand."""

from __future__ import annotations

import pytest

from baton.deploy.rates import WINDOW_S, LatencyQuantiles, NodeRates, Sums, Window, rates
from baton.router.http.page.files import STATIC
from baton.router.http.page.types import EndedRequests

from .conftest import node, snapshot


def test_a_rate_is_the_difference_divided_by_the_time() -> None:
    old = snapshot(100.0, node(computed=10, generated=50), done=3, tokens=100, prompts=(200, 0))
    new = snapshot(104.0, node(computed=30, generated=58), done=5, failed=1, tokens=180, moves=1, prompts=(300, 25))
    now = rates(old, new)
    assert (now.seconds, now.requests_per_s, now.tokens_per_s, now.output_tokens, now.moves) == (4.0, 0.5, 20.0, 80, 1)
    assert now.requests == EndedRequests(done=2, failed=1, cancelled=0, refused=0)
    assert now.cached_share == 0.25
    assert now.nodes == {"decode-0": NodeRates(5.0, 2.0, 2e6)}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((5, 5, 5, 0), (6, 7, 6, 0), LatencyQuantiles(0.15, 0.36)),  # 1, 2 and 1 values; ranks 2 and 3.8 of 4
        ((0, 0, 0, 0), (1, 0, 0, 0), LatencyQuantiles(0.05, 0.095)),
        ((0, 0, 0, 2), (0, 0, 0, 9), LatencyQuantiles(0.4, 0.4)),  # above the last bound
        ((1, 2, 3, 4), (1, 2, 3, 4), None),
        ((0, 0, 0, 0), (0, 0, 0, 0), None),
    ],
)
def test_percentiles_are_those_of_the_values_between_two_snapshots(
    old: tuple[int, ...], new: tuple[int, ...], expected: LatencyQuantiles | None
) -> None:
    found = rates(snapshot(100.0, ttft=old), snapshot(101.0, ttft=new)).ttft
    if expected is None or found is None:
        assert found is expected
    else:
        assert (found.p50_s, found.p95_s) == pytest.approx((expected.p50_s, expected.p95_s))


def test_a_router_that_has_started_again_counts_from_its_start() -> None:
    old = snapshot(100.0, done=900, tokens=90_000, ttft=(9, 9, 9, 9))
    new = snapshot(110.0, epoch="second", uptime_s=4.0, done=2, tokens=40, ttft=(2, 0, 0, 0))
    for now in (rates(old, new), rates(None, new)):
        assert (now.seconds, now.requests.done, now.tokens_per_s) == (4.0, 2, 10.0)
        assert now.ttft is not None and now.ttft.p50_s == 0.05
    window = Window()
    assert window.add(old) is None
    assert window.add(new) is None, "one snapshot of this router"


def test_a_node_that_has_started_again_is_left_out_once() -> None:
    first = snapshot(100.0, node(drafts=(100, 500, 100)), node("decode-1", steps=90, drafts=(100, 500, 500)))
    second = snapshot(101.0, node(drafts=(110, 550, 125)), node("decode-1", steps=3, drafts=(200, 900, 900)))
    third = snapshot(102.0, node(drafts=(110, 550, 125)), node("decode-1", steps=9, drafts=(202, 910, 910)))
    now = rates(first, second)
    assert (now.tokens_per_round, now.acceptance, list(now.nodes)) == (3.5, 0.5, ["decode-0"])
    now = rates(second, third)
    assert (now.tokens_per_round, now.acceptance) == (6.0, 1.0)
    assert rates(third, third).acceptance is None, "no round"
    gone = snapshot(103.0, node(drafts=(111, 550, 125)))
    assert rates(third, gone).tokens_per_round == 1.0, "a round without drafts"
    assert rates(third, gone).acceptance is None


def test_a_caller_who_sees_counts_only_has_the_sums_of_nodes() -> None:
    first, second = (snapshot(at, sees="counts", drafts=drafts) for at, drafts in ((1, (10, 50, 5)), (2, (20, 90, 25))))
    assert (rates(first, second).tokens_per_round, rates(first, second).acceptance) == (3.0, 0.5)
    assert rates(second, first).tokens_per_round is None, "a node was lost, so the sums fell"


def test_a_clock_that_is_set_back_changes_no_rate() -> None:
    window = Window()
    window.add(snapshot(100.0, uptime_s=10.0, tokens=100))
    now = window.add(snapshot(70.0, uptime_s=12.0, tokens=140))
    assert now is not None and (now.seconds, now.tokens_per_s) == (2.0, 20.0)


def test_what_is_shown_covers_the_last_seconds_as_it_does_on_the_page() -> None:
    assert f"const RECENT_S = {WINDOW_S:g};" in (STATIC / "history.js").read_text()
    window = Window()
    shown = [window.add(snapshot(100.0 + second, tokens=second**2)) for second in range(20)]
    assert shown[0] is None
    assert shown[1] is not None and (shown[1].seconds, shown[1].output_tokens) == (1.0, 1)
    assert shown[-1] is not None and (shown[-1].seconds, shown[-1].output_tokens) == (WINDOW_S, 19**2 - 9**2)


def test_sums_go_on_over_a_restart_of_the_router() -> None:
    sums = Sums()
    sums.add(snapshot(100.0, uptime_s=2.0))
    sums.add(snapshot(101.0, uptime_s=3.0, done=4, tokens=60))
    sums.add(snapshot(103.0, uptime_s=5.0, done=5, failed=1, tokens=60))  # no token came: not busy
    sums.add(snapshot(110.0, epoch="second", uptime_s=2.0, done=1, tokens=30, moves=1))
    assert sums.requests == EndedRequests(done=6, failed=1, cancelled=0, refused=0)
    assert (sums.tokens, sums.busy_s, sums.moves) == (90, 3.0, 1)
