"""Lines about nodes and speculation, from the router's real answers: only if there is news."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.deploy.monitor import SPECULATION_EVERY_S, Counts, NodeNews, Snapshot, SpeculationNews, parse
from baton.metadata.errors import Unavailable
from baton.metadata.wire.node_info import Load, NodeStats
from baton.router.figures.metrics import Metrics


def page(num_tokens: int, **nodes: tuple[int, int, int] | None) -> str:
    """Return a page of /metrics as the router writes it. `nodes`: rounds, drafts and accepted drafts of each."""
    metrics = Metrics()
    listed: list[Any] = []
    for name, counts in nodes.items():
        rounds, drafted, accepted = counts or (0, 0, 0)
        stats = NodeStats(num_rounds=rounds, num_drafted=drafted, accepted_at=(accepted - accepted // 3, accepted // 3))
        hello = SimpleNamespace(
            model=SimpleNamespace(name='a "model"'), capacity=SimpleNamespace(num_pages=1, num_ranks=1), place=None
        )
        listed.append(
            SimpleNamespace(
                node_id=name,
                role="decode",
                stats=stats,
                hello=hello,
                load=Load(1, 0, 0),  # type: ignore[call-arg]
                is_draining=False,
                beat=None,
            )
        )
    registry: Any = SimpleNamespace(nodes=dict(enumerate(listed)), histories=[])
    metrics.watch_nodes(registry, lambda: 0)
    generation = SimpleNamespace(group=SimpleNamespace(key=SimpleNamespace(model="m")), first_token_at=1.0)
    metrics.tokens(generation, SimpleNamespace(seen_at=None), num_tokens, 2.0)  # type: ignore[arg-type]
    return metrics.page().decode()


class Watch:
    """SpeculationNews that reads the pages it is given, SPECULATION_EVERY_S apart."""

    def __init__(self, algorithm: str = "eagle") -> None:
        self.now = 100.0
        self.num_reads = 0
        self._page: str | None = None
        self.news = SpeculationNews(algorithm, self._read)

    def _read(self) -> str:
        self.num_reads += 1
        if self._page is None:
            raise Unavailable("nobody listens")
        return self._page

    def look(self, page: str | None, after_s: float = SPECULATION_EVERY_S) -> str | None:
        self.now += after_s
        self._page = page
        return self.news.line(self.now)


def test_the_router_s_page_is_read() -> None:
    figures = parse(page(7, d0=(10, 50, 32), d1=(1, 5, 0)))
    assert figures.num_tokens == 7
    assert figures.nodes == {"d0": Counts(10, 50, 32), "d1": Counts(1, 5, 0)}
    assert parse('{"data": [{"id": "toy"}]}').nodes == {}


def test_each_line_covers_the_time_since_the_last_one() -> None:
    watch = Watch()
    assert watch.look(page(100, d0=(1000, 5000, 100))) is None  # where it begins
    expected = "speculation eagle: 4.2 tokens per round, 64 % of drafts accepted (last 5 s, 1,234 rounds)"
    assert watch.look(page(5283, d0=(2234, 11170, 4049))) == expected
    assert watch.look(page(5291, d0=(2235, 11175, 4050), d1=(1, 5, 5))) == (  # a new node's first figures do not count
        "speculation eagle: 2.0 tokens per round, 20 % of drafts accepted (last 5 s, 1 round)"
    )


def test_figures_of_nodes_are_summed_without_restarted_nodes() -> None:
    watch = Watch("ngram")
    watch.look(page(1, d0=(10, 10, 10), d1=(100, 100, 100)))
    line = watch.look(page(9, d0=(12, 12, 10), d1=(102, 106, 104)))
    assert line == "speculation ngram: 2.0 tokens per round, 50 % of drafts accepted (last 5 s, 4 rounds)"
    line = watch.look(page(19, d0=(4, 4, 4), d1=(104, 110, 108)))
    assert line == "speculation ngram: 3.0 tokens per round, 100 % of drafts accepted (last 5 s, 2 rounds)"


def test_rounds_without_drafts_have_no_share() -> None:
    watch = Watch("ngram")
    watch.look(page(1, d0=(10, 10, 10)))
    assert watch.look(page(9, d0=(15, 10, 10))) == "speculation ngram: 1.0 tokens per round (last 5 s, 5 rounds)"


def test_no_line_is_printed_if_no_client_got_a_token() -> None:
    watch = Watch()
    watch.look(page(5, d0=(10, 50, 30)))
    assert watch.look(page(5, d0=(10, 50, 30))) is None
    assert watch.look(page(5, d0=(12, 60, 35))) is None  # a canary
    assert watch.look(page(9, d0=(12, 60, 35))) is None  # tokens, but no rounds yet (or not speculated)
    assert watch.look(page(9, d0=(13, 65, 38))) is not None  # here they are, a heartbeat later
    assert watch.look(page(9, d0=(14, 70, 40))) is None
    assert watch.look(page(2, d0=(15, 75, 40))) is None  # another router counts from the start


def test_metrics_are_read_seconds_apart_even_if_the_router_is_away_once() -> None:
    watch = Watch()
    assert watch.news.due_in(watch.now) == 0
    watch.look(page(1, d0=(1, 5, 0)))
    assert watch.news.due_in(watch.now + 2) == SPECULATION_EVERY_S - 2
    assert watch.look(page(9, d0=(9, 45, 8)), after_s=SPECULATION_EVERY_S - 0.1) is None
    assert watch.num_reads == 1
    assert watch.look(None, after_s=0.1) is None
    assert watch.look(page(9, d0=(9, 45, 8))) == (
        "speculation eagle: 2.0 tokens per round, 20 % of drafts accepted (last 10 s, 8 rounds)"
    )


@pytest.mark.parametrize("now", [0.0, 1e6])
def test_without_speculation_the_metrics_are_not_read(now: float) -> None:
    watch = Watch("none")
    assert watch.news.due_in(now) is None
    assert watch.look(page(9, d0=(9, 45, 8)), after_s=now) is None
    assert watch.num_reads == 0


def test_each_change_of_the_nodes_is_one_line() -> None:
    news = NodeNews()
    both, draining = frozenset({"p0", "d0"}), ("d0 is draining",)
    assert news.lines(Snapshot(True, both)) == []
    assert news.lines(Snapshot(True, both, draining)) == ["d0 is draining"]
    assert news.lines(Snapshot(False)) == [], "the launcher itself reports a router that does not answer"
    assert news.lines(Snapshot(True, both, draining)) == []
    assert news.lines(Snapshot(True, both)) == ["no node is draining any more"]
    assert news.lines(Snapshot(True, both, (), "no decode node")) == ["nothing is served now: no decode node"]
    assert news.lines(Snapshot(True, both, (), "no decode node")) == []
    assert news.lines(Snapshot(True, both)) == ["requests are served again"]
