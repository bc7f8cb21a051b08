"""Whose turn it is, who may wait and gives up a place, and who has waited too long: the queues, without nodes."""

from __future__ import annotations

import time
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.metadata.errors import Overloaded, RequestError, Unavailable
from baton.router.errors import NodeFault
from baton.router.queue import (
    AGE_S,
    MARGIN_S,
    PATIENCE_S,
    Asked,
    Bounds,
    Entry,
    Queues,
    WaitingQueue,
    turn_of,
)

# --- whose turn it is: first come first served within a priority, and nobody starved ---------------------------------

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


# --- who may wait, who gives up a place, and who is too late ---------------------------------------------------------


class _Group:  # hashed by its identity, as groups are
    page_size = 16
    layout = SimpleNamespace(page_size=16, key_lookahead=0)
    live = staticmethod(lambda role: [])


GROUP: Any = _Group()


class Door:
    """An intake of at most 4 requests and 100 prompt tokens, which may wait 10 s."""

    def __init__(self) -> None:
        self.queues = Queues(Bounds(4, 100, 10.0))
        self.queue = self.queues.waiting_in(GROUP)
        self.refused: list[Any] = []
        self.pace = self.queues.pace(GROUP)

    def check_room(self, asked: Asked) -> None:
        self.queues.check_room(GROUP, asked, time.monotonic())

    def make_room(self, asked: Asked) -> None:
        """As the dispatcher does."""
        now = time.monotonic()
        self.queues.check_room(GROUP, asked, now)
        while (displaced := self.queues.displaced(GROUP, asked, now)) is not None:
            self._fail(*displaced)

    def refuse_late(self, now: float) -> None:
        for refused in self.queues.late(GROUP, now):
            self._fail(*refused)

    def wait(self, num_tokens: int = 10, priority: int = 0, age_s: float = 1.0, **more: Any) -> Any:
        """A request waits already, since `age_s`; returns it."""
        request: Any = SimpleNamespace(
            group=GROUP,
            prompt_ids=[1] * num_tokens,
            sequences=[SimpleNamespace(received=[], num_left=5, finish_reason=None)],
            cache_salt="",
            created_at=time.monotonic() - age_s,
            priority=priority,
            dispatched_at=None,
            deadline=None,
            params=SimpleNamespace(max_tokens=100),
            is_canary=False,
            num_generated=10,
        )
        vars(request).update(more)
        self.queue.add(Entry(request, (0,)))
        return request

    def full(self, interval_s: float = 1.0, service_s: float = 2.0) -> None:
        """Nodes are full, grant one each interval, and take so long for each."""
        self.pace.blocked(100.0)
        for number in range(100):
            self.pace.granted(100.0 + interval_s * (number + 1))
            self.pace.served(service_s, 10)

    def _fail(self, request: Any, error: Any) -> None:
        self.refused.append(request)
        self.queue.withdraw(request)
        assert isinstance(error, Overloaded)


def asked(num_requests: int = 1, num_tokens: int = 10, priority: int = 0, timeout_s: float = 60.0) -> Asked:
    return Asked(num_requests, num_tokens, 100, priority, timeout_s)


def test_requests_and_tokens_are_bounded_apart() -> None:
    door = Door()
    for _ in range(3):
        door.wait()
    door.check_room(asked(num_tokens=70))
    with pytest.raises(Overloaded, match="3 requests wait already; at most 4"):
        door.check_room(asked(num_requests=2))
    with pytest.raises(Overloaded, match="30 prompt tokens wait already; at most 100"):
        door.check_room(asked(num_tokens=71))


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(5, 10), (1, 101)])
def test_what_could_never_wait_is_the_clients_fault(num_requests: int, num_tokens: int) -> None:
    with pytest.raises(RequestError):
        Door().check_room(asked(num_requests, num_tokens))
    Door().check_room(asked(4, 100))


def test_those_behind_give_up_no_more_places_than_are_needed() -> None:
    door = Door()
    first, *others = (door.wait(num_tokens=20, priority=1) for _ in range(4))
    door.check_room(asked(num_tokens=20, priority=0))
    assert door.refused == [], "asking costs nobody a place"
    door.make_room(asked(num_tokens=20, priority=0))
    assert door.refused == [others[-1]], "the last one, and no other"
    door.make_room(asked(num_tokens=60, priority=0))
    assert door.refused == [others[-1], others[-2]], "60 tokens take the place of 20 where 40 are free"
    with pytest.raises(Overloaded):
        door.make_room(asked(num_requests=4, num_tokens=90, priority=2))
    assert first not in door.refused


def test_who_comes_first_or_has_nodes_keeps_its_place() -> None:
    door = Door()
    for _ in range(4):
        door.wait(priority=0)
    with pytest.raises(Overloaded):
        door.make_room(asked(priority=0))
    door = Door()
    for _ in range(4):
        door.wait(priority=1, dispatched_at=1.0)
    with pytest.raises(Overloaded):
        door.make_room(asked(priority=0))
    assert door.refused == []


def test_who_would_wait_too_long_or_be_late_is_refused_on_arrival() -> None:
    door = Door()
    door.full(interval_s=4.0, service_s=3.0)
    door.wait()
    door.check_room(asked(timeout_s=60.0))  # 8 s, and then 3 s
    with pytest.raises(Overloaded, match=r"about 8\.0 s, and 3\.0 s more"):
        door.check_room(asked(timeout_s=11.0 + 0.9 * MARGIN_S))
    door.check_room(asked(timeout_s=11.0 + 1.1 * MARGIN_S))
    door.wait()
    with pytest.raises(Overloaded, match=r"it may wait 10\.0 s"):
        door.check_room(asked(timeout_s=60.0))
    door.pace.unblocked()
    door.check_room(asked(timeout_s=0.1))  # nodes have room: it may just do


def test_who_has_become_late_is_refused_before_it_costs_anything() -> None:
    door = Door()
    door.full(service_s=3.0)
    now = time.monotonic()
    late = door.wait(deadline=now + 3.0 + 0.9 * MARGIN_S)
    in_time = door.wait(deadline=now + 3.0 + 2.0 * MARGIN_S)
    no_limit, has_nodes = door.wait(), door.wait(deadline=now + 1.0, dispatched_at=now)
    just_came = door.wait(deadline=now + 1.0, age_s=0.5 * PATIENCE_S)
    is_over = door.wait(deadline=now - 0.1)  # ends by its deadline, not as a refusal
    door.refuse_late(now)
    assert door.refused == [late]
    waiting = {id(entry.request): door.queues.is_late(entry, now) for entry in door.queue}
    assert waiting == {id(in_time): False, id(no_limit): False, id(has_nodes): False, id(just_came): False} | {
        id(is_over): True
    }


def test_canaries_and_those_that_never_ran_say_nothing_of_the_pace() -> None:
    door = Door()
    now = time.monotonic()
    for request in (door.wait(), door.wait(dispatched_at=now - 100.0, is_canary=True)):
        door.queues.ended(request, now)
    assert door.pace.service_s(100) == 0.0
    door.queues.ended(door.wait(dispatched_at=now - 2.0), now)
    assert door.pace.service_s(100) == pytest.approx(2.0)


def test_a_forgotten_group_starts_anew() -> None:
    door = Door()
    door.full()
    door.queues.forget(GROUP)
    assert door.queues.pace(GROUP).service_s(100) == 0.0


# --- who waits for a node that is not there, for how long, and what the error says -----------------------------------


def node(num_pages: int = 100) -> Any:
    capacity = SimpleNamespace(num_pages=num_pages, max_running=8)
    model = SimpleNamespace(context_len=1000)
    hello = SimpleNamespace(capacity=capacity, model=model)
    return SimpleNamespace(hello=hello, routing_id=b"d0", welcomed_at=0.0)


class Group:
    """Nodes of both roles; every prefill makes a pair with every decode node."""

    key = SimpleNamespace(model="fake")
    page_size = 16
    layout = SimpleNamespace(page_size=16, key_lookahead=0)
    tokenizer: Any = object()

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.by_role = {"prefill": [node() for _ in range(prefill)], "decode": [node() for _ in range(decode)]}
        self.nodes: dict[bytes, Any] = {}

    def live(self, role: str) -> list[Any]:
        return self.by_role[role]

    def pairs(self) -> Any:
        return ((prefill, decode) for prefill in self.by_role["prefill"] for decode in self.by_role["decode"])

    @property
    def is_paired(self) -> bool:
        return any(True for _ in self.pairs())

    def most_pages(self, role: str) -> int:
        return max((each.hello.capacity.num_pages for each in self.by_role[role]), default=0)


class Waiting:
    """One entry that waits 10 s for nodes, looked at four times a second."""

    def __init__(self, group: Any, *, is_usable: bool = True, needs_decode: bool = True, **entry: Any) -> None:
        self.group, self.is_usable, self.now = group, is_usable, 100.0
        self.errors: list[Any] = []
        self.queues = Queues(Bounds(4, 100, 60.0, node_wait_s=10.0))
        request: Any = SimpleNamespace(
            is_over=False,
            created_at=0.0,
            priority=0,
            group=group,
            prompt_ids=[5] * 160,
            cache_salt="",
            params=SimpleNamespace(max_tokens=100),
            sequences=[SimpleNamespace(received=[], num_left=100 if needs_decode else 1, finish_reason=None)],
        )
        self.entry: Any = Entry(request, (0,))
        self.queues.add(self.entry)
        for name, value in entry.items():
            setattr(self.entry, name, value)

    def after(self, seconds: float) -> list[Any]:
        """The errors so far, this much later."""
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            pairs = list(self.group.pairs()) if self.is_usable else []
            refused = self.queues.stranded(self.group, pairs, lambda _: "pair p0 -> d0: secret words", self.now)
            self.errors += [error for _, error in refused]
        return self.errors


@pytest.mark.parametrize("missing", ["prefill", "decode", "both"])
def test_who_has_no_node_waits_as_long_as_stated_and_is_told_which(missing: str) -> None:
    group = Group(prefill=missing == "decode", decode=missing == "prefill")
    waiting = Waiting(group)
    assert waiting.after(10.0) == []
    (error,) = waiting.after(0.5)[:1]
    words = "no prefill and no decode node is left" if missing == "both" else f"no {missing} node is left"
    assert isinstance(error, Unavailable) and words in str(error) and "10 s" in str(error)


def test_a_node_that_comes_in_time_starts_the_count_anew() -> None:
    waiting = Waiting(Group(decode=0))
    assert waiting.after(9.0) == []
    waiting.group.by_role["decode"].append(node())
    waiting.after(0.25)
    waiting.group.by_role["decode"].clear()
    assert waiting.after(9.0) == []
    assert len(waiting.after(2.0)[:1]) == 1


@pytest.mark.parametrize("change", [{"attempt": object()}, {"request": SimpleNamespace(is_over=True)}])
def test_who_is_being_asked_for_or_is_over_is_not_stranded(change: dict[str, Any]) -> None:
    waiting = Waiting(Group(decode=0), **change)
    assert waiting.after(30.0) == []


def test_one_token_needs_no_decode_node() -> None:
    assert Waiting(Group(decode=0), needs_decode=False).after(30.0) == []
    assert Waiting(Group(prefill=0), needs_decode=False).after(30.0)


@pytest.mark.parametrize(("role", "num_pages"), [("prefill", 10), ("decode", 11)])
def test_a_pool_that_was_large_enough_is_waited_for(role: str, num_pages: int) -> None:
    """The prompt takes 10 pages of a prefill node, and with room to generate 11 of a decode node."""
    group = Group(decode=2, prefill=2)
    for each in group.by_role[role]:
        each.hello.capacity.num_pages = num_pages
    assert Waiting(group).after(30.0) == []
    for each in group.by_role[role]:
        each.hello.capacity.num_pages = num_pages - 1
    assert "none has room for the 11 pages" in str(Waiting(group).after(30.0)[0])


def test_large_pools_that_make_no_pair_are_none() -> None:
    """A large prefill node works with a small decode node alone, and the other way round."""
    group: Any = Group(decode=2, prefill=2)
    large_prefill, small_prefill = group.by_role["prefill"]
    large_decode, small_decode = group.by_role["decode"]
    small_prefill.hello.capacity.num_pages = small_decode.hello.capacity.num_pages = 5
    group.pairs = lambda: [(large_prefill, small_decode), (small_prefill, large_decode)]
    assert Waiting(group).after(30.0)


def test_pairs_that_do_not_work_are_waited_for_and_their_words_kept_inside() -> None:
    waiting = Waiting(Group(), is_usable=False)
    assert waiting.after(10.0) == []
    error = waiting.after(0.5)[0]
    assert isinstance(error, NodeFault) and "secret words" in str(error) and "secret words" not in error.shown


def test_new_requests_may_wait_where_others_were_served_lately() -> None:
    waiting = Waiting(Group())
    group, may_wait = waiting.group, waiting.queues.may_wait
    never_served: Any = Group(decode=0)
    assert may_wait(group, 0.0)  # it can serve
    waiting.after(0.25)
    group.by_role["decode"].clear()
    assert may_wait(group, waiting.now + 10.0) and not may_wait(group, waiting.now + 10.1)
    waiting.queues.has_served(group, waiting.now + 5.0)
    assert may_wait(group, waiting.now + 15.0)
    waiting.queues.withdraw(waiting.entry.request)
    waiting.queues.forget(group)
    assert not may_wait(group, waiting.now)
    assert not may_wait(never_served, 10.1)


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_new_requests_may_wait_where_a_node_joined_lately(missing: str) -> None:
    """Its partner may be about to join, as after a restart of the router."""
    queues: Any = Waiting(Group()).queues
    group = Group(prefill=missing == "decode", decode=missing == "prefill")
    assert queues.may_wait(group, 10.0) and not queues.may_wait(group, 10.1)
    group.by_role["decode" if missing == "prefill" else "prefill"].append(later := node())
    later.welcomed_at = 5.0
    assert queues.may_wait(group, 15.0) and not queues.may_wait(group, 15.1)
    group.tokenizer = None
    assert not queues.may_wait(group, 15.0), "nobody can read its prompt yet"
    assert not queues.may_wait(Group(prefill=0, decode=0), 0.0)


def test_a_pair_that_takes_nobody_does_not_serve() -> None:
    waiting = Waiting(Group(), is_usable=False)
    waiting.after(1.0)
    waiting.group.by_role["decode"].clear()
    assert not waiting.queues.may_wait(waiting.group, waiting.now)
