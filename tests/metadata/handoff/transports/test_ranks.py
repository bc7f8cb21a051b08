"""Pages between nodes with unlike numbers of ranks: every rank gets its own heads, and wrong bytes are caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from handoff_nodes import make_row, named, spin, unit
from rank_nodes import RankPair, heads_schema

from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived, TransferFailed

MakePair = Callable[..., RankPair]

# ranks of prefill, ranks of decode, heads of the target, heads of the draft
SIZES = [
    (1, 2, 4, 2),
    (2, 1, 4, 2),
    (2, 2, 4, 2),
    (2, 3, 6, 1),
    (3, 2, 6, 6),
    (2, 4, 2, 4),
    (4, 2, 2, 4),
    (4, 3, 12, 1),
    (4, 1, 2, 1),
    (1, 4, 2, None),
]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    made: list[RankPair] = []

    def make(*args: Any, **how: Any) -> RankPair:
        made.append(RankPair(*args, **how))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def run(pair: RankPair, *kinds: type) -> list[Any]:
    """Poll all ranks until each kind of event came. Return the events."""
    return spin(pair.nodes, lambda events: all(named(events, kind) for kind in kinds))


@pytest.mark.parametrize("way", ["local", "zmq"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_gets_its_heads(sizes: tuple[int, int, int, int | None], way: str, make_pair: MakePair) -> None:
    num_prefill, num_decode, target, draft = sizes
    pair = make_pair(heads_schema(target, draft), num_prefill, num_decode, decode=(way,))
    pair.claim([9, 1, 4])
    pair.offer([2, 3, 5])
    events = run(pair, Arrived, TicketEnded)
    [event] = named(events, Arrived)
    assert event.row == make_row(pair.schema) and event.num_pages == 3 and event.times.transport == "ranks"
    assert named(events, TicketEnded) == [TicketEnded(unit(), "acked")]
    assert pair.has_arrived([9, 1, 4], [2, 3, 5])
    assert not pair.client.tickets() and not pair.server.tickets()
    assert pair.server.dropped.count == pair.client.dropped.count == 0
    assert not any(each.num_dropped for each in pair.page_servers)
    assert not any(each.dropped.count for each in pair.pullers)


@pytest.mark.parametrize("way", ["cuda", "zmq"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_gets_its_heads_on_its_gpu(
    sizes: tuple[int, int, int, int | None], way: str, make_pair: MakePair
) -> None:
    num_prefill, num_decode, target, draft = sizes
    pair = make_pair(heads_schema(target, draft), num_prefill, num_decode, has_gpu=True, decode=(way,))
    pair.offer([2, 3, 5])
    pair.claim([9, 1, 4])
    run(pair, Arrived, TicketEnded)
    assert pair.has_arrived([9, 1, 4], [2, 3, 5])
    assert bool(pair.targets[0].device.called("gather")) == (way == "cuda")
