"""Whose turn it is: first come first served within a priority, and nobody starved across priorities."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.router.queue import AGE_S, WaitingQueue, turn_of

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 500_000).map(lambda ms: ms / 1000), st.integers(-100, 100), st.booleans()), max_size=30
)


def entry(arrived_at: float, priority: int, num_tokens: int = 1) -> Any:
    request = SimpleNamespace(created_at=arrived_at, priority=priority, dispatched_at=None)
    return SimpleNamespace(request=request, num_tokens=num_tokens, turn=None, is_fresh=True)


@given(ARRIVALS)
def test_the_order(arrivals: list[tuple[float, int, bool]]) -> None:
    queue = WaitingQueue()
    added = [(entry(at, priority, place), is_first) for place, (at, priority, is_first) in enumerate(arrivals)]
    for each, is_first in added:
        queue.add(each, first=is_first)
    order = list(queue)
    moved = [each for each, is_first in added if is_first]
    assert order[: len(moved)] == moved[::-1], "what is put in front last is first"
    fresh = order[len(moved) :]
    for early, late in combinations(fresh, 2):
        a, b = early.request, late.request
        if a.priority == b.priority:
            assert a.created_at <= b.created_at
        assert a.created_at - b.created_at <= AGE_S * (b.priority - a.priority), "overtaken by one that came too late"
    same = [each for each, is_first in added if not is_first]
    assert [each for each in fresh if turn(each) == turn(same[0])][:1] == same[:1] if same else True
    assert queue.num_tokens == sum(range(len(arrivals)))


def turn(each: Any) -> float:
    return turn_of(each.request.created_at, each.request.priority)


@given(ARRIVALS, st.data())
def test_adding_and_removing(arrivals: list[tuple[float, int, bool]], data: st.DataObject) -> None:
    queue = WaitingQueue()
    entries = [entry(at, priority, 3) for at, priority, _ in arrivals]
    for each, (_, _, is_first) in zip(entries, arrivals, strict=True):
        queue.add(each, first=is_first)
    gone = data.draw(st.lists(st.sampled_from(entries), unique_by=id)) if entries else []
    left = [each for each in queue if each not in gone]
    for each in gone:
        queue.remove(each)
        queue.remove(each)  # a second time does nothing
    assert list(queue) == left
    assert (len(queue), queue.num_tokens) == (len(left), 3 * len(left))


def test_places() -> None:
    queue = WaitingQueue()
    entries = [entry(1.0, 0), entry(2.0, 0), entry(3.0, 1), entry(4.0, -1)]
    for each in entries:
        queue.add(each)
    assert list(queue) == [entries[3], entries[0], entries[1], entries[2]]
    assert [queue.num_before(turn_of(5.0, priority)) for priority in (-2, -1, 0, 1)] == [0, 1, 3, 4]
    assert queue.fresh_after(turn_of(5.0, -1)) == [entries[2], entries[1], entries[0]]
    entries[1].is_fresh = False
    assert queue.fresh_after(turn_of(5.0, -1)) == [entries[2], entries[0]]
