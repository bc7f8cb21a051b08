"""Bounded lists of times keep their sums, however many times are added."""

from __future__ import annotations

import pytest

from baton.metadata.wire.times import ChunkTimes, add_bounded


@pytest.mark.parametrize("count", [1, 4, 5, 6, 23, 1000])
def test_a_full_list_joins_neighbours(count: int) -> None:
    items: list[ChunkTimes] = []
    for place in range(count):
        add_bounded(items, ChunkTimes(1, place, 0.25, 0.5), most=4)
        assert len(items) <= 4
    assert sum(item.num_chunks for item in items) == count
    assert sum(item.num_tokens for item in items) == count * (count - 1) // 2
    assert sum(item.waited_s + item.compute_s for item in items) == 0.75 * count


def test_a_list_within_its_bound_keeps_every_entry() -> None:
    items: list[ChunkTimes] = []
    for place in range(4):
        add_bounded(items, ChunkTimes(1, place, 0.0, float(place)), most=4)
    assert items == [ChunkTimes(1, place, 0.0, float(place)) for place in range(4)]
