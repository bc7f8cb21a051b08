"""The queues: the order of requests, the bounds on waiting, and the requests that are refused or end late.

Most tests drive the queues without nodes. Those at the end run a router with fake nodes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.metadata.cache.names import PageNames
from baton.metadata.errors import Overloaded, RequestError, Unavailable
from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Capacity
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.router.errors import NodeFault
from baton.router.nodes.prompt_role import GroupFacts
from baton.router.tenants.fair_share import DEFAULT, UNSHARED, Tenant
from baton.router.waiting.admission import MARGIN_S, PATIENCE_S, Asked, Bounds, Queues
from baton.router.waiting.entry import Entry
from baton.router.waiting.queue import AGE_S, WaitingQueue, turn_of

from ..conftest import System
from ..dispatching.test_runner import own, wait_until
from ..fake_nodes import make_layout

# --- the order: first come first served within a priority, and no request starves ------------------------------------

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 500_000).map(lambda ms: ms / 1000), st.integers(-100, 100), st.booleans()), max_size=30
)


def entry(arrived_at: float, priority: int, num_tokens: int = 1) -> Any:
    request = SimpleNamespace(created_at=arrived_at, priority=priority, dispatched_at=None, tenant=DEFAULT)
    return SimpleNamespace(request=request, num_tokens=num_tokens, turn=None, is_fresh=True)


@given(ARRIVALS)
def test_requests_wait_in_order_of_arrival_within_a_priority_and_age_upwards(
    arrivals: list[tuple[float, int, bool]],
) -> None:
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
def test_removing_an_entry_leaves_the_order_of_the_others(
    arrivals: list[tuple[float, int, bool]], data: st.DataObject
) -> None:
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


def test_the_place_in_the_queue_follows_from_the_turn() -> None:
    queue = WaitingQueue()
    entries = [entry(1.0, 0), entry(2.0, 0), entry(3.0, 1), entry(4.0, -1)]
    for each in entries:
        queue.add(each)
    assert list(queue) == [entries[3], entries[0], entries[1], entries[2]]
    assert [queue.num_before(turn_of(5.0, priority)) for priority in (-2, -1, 0, 1)] == [0, 1, 3, 4]
    assert list(queue.last_fresh(turn=turn_of(5.0, -1))) == [entries[2], entries[1], entries[0]]
    entries[1].is_fresh = False
    assert list(queue.last_fresh(turn=turn_of(5.0, -1))) == [entries[2], entries[0]]


# --- bounds: which requests may wait, give up their place, or come too late ------------------------------------------


class _Group:  # hashed by its identity, as groups are
    page_size = 16
    context_len = 1 << 20
    layout = make_layout(16)
    names = PageNames(b"", 16, 0)
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
        """Make room for a request as the dispatcher does."""
        now = time.monotonic()
        self.queues.check_room(GROUP, asked, now)
        while (displaced := self.queues.displaced(GROUP, asked, now)) is not None:
            self._fail(*displaced)

    def refuse_late(self, now: float) -> None:
        for refused in self.queues.late(GROUP, now):
            self._fail(*refused)

    def wait(self, num_tokens: int = 10, priority: int = 0, age_s: float = 1.0, **more: Any) -> Any:
        """Add a request that has been waiting for `age_s`, and return it."""
        request: Any = SimpleNamespace(
            group=GROUP,
            prompt_ids=[1] * num_tokens,
            sequences=[SimpleNamespace(received=[], num_left=5, finish_reason=None)],
            cache_salt="",
            created_at=time.monotonic() - age_s,
            priority=priority,
            dispatched_at=None,
            tenant=DEFAULT,
            deadline=None,
            params=SimpleNamespace(max_tokens=100, grammar=None),
            is_canary=False,
            num_generated=10,
        )
        vars(request).update(more)
        self.queue.add(Entry(request, (0,)))
        return request

    def full(self, interval_s: float = 1.0, service_s: float = 2.0) -> None:
        """Make the nodes full: they grant one request per interval, and each takes `service_s`."""
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


def test_requests_and_tokens_have_separate_bounds() -> None:
    door = Door()
    for _ in range(3):
        door.wait()
    door.check_room(asked(num_tokens=70))
    with pytest.raises(Overloaded, match="3 requests wait already; at most 4"):
        door.check_room(asked(num_requests=2))
    with pytest.raises(Overloaded, match="30 prompt tokens wait already; at most 100"):
        door.check_room(asked(num_tokens=71))


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(5, 10), (1, 101)])
def test_a_request_larger_than_the_queue_is_a_client_error(num_requests: int, num_tokens: int) -> None:
    with pytest.raises(RequestError):
        Door().check_room(asked(num_requests, num_tokens))
    Door().check_room(asked(4, 100))


def test_later_requests_give_up_only_as_many_places_as_needed() -> None:
    door = Door()
    first, *others = (door.wait(num_tokens=20, priority=1) for _ in range(4))
    door.check_room(asked(num_tokens=20, priority=0))
    assert door.refused == [], "asking must not cost a place"
    door.make_room(asked(num_tokens=20, priority=0))
    assert door.refused == [others[-1]], "the last one, and no other"
    door.make_room(asked(num_tokens=60, priority=0))
    assert door.refused == [others[-1], others[-2]], "60 tokens take the place of 20 where 40 are free"
    with pytest.raises(Overloaded):
        door.make_room(asked(num_requests=4, num_tokens=90, priority=2))
    assert first not in door.refused


def test_earlier_requests_and_those_with_nodes_keep_their_places() -> None:
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


def test_requests_that_would_wait_too_long_or_be_late_are_refused_on_arrival() -> None:
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


def test_late_requests_are_refused_before_they_get_nodes() -> None:
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


def test_canaries_and_requests_that_never_ran_do_not_change_the_pace() -> None:
    door = Door()
    now = time.monotonic()
    for request in (door.wait(), door.wait(dispatched_at=now - 100.0, is_canary=True)):
        door.queues.ended(request, now)
    assert door.pace.service_s(100) == 0.0
    door.queues.ended(door.wait(dispatched_at=now - 2.0), now)
    assert door.pace.service_s(100) == pytest.approx(2.0)


def test_a_forgotten_group_starts_with_an_empty_pace() -> None:
    door = Door()
    door.full()
    door.queues.forget(GROUP)
    assert door.queues.pace(GROUP).service_s(100) == 0.0


# --- tenants: who is served next, who gives up a place, and when a refused client comes again ------------------------


def of(tenant: str, at: float = 1.0, priority: int = 0, num_tokens: int = 10) -> Any:
    made = entry(at, priority, num_tokens)
    made.request.tenant, made.request.share = Tenant(tenant), None
    return made


def test_tenants_take_turns_and_priority_orders_one_tenant_only() -> None:
    queue = WaitingQueue()
    flood = [of("a", 1.0 + place, priority=-100) for place in range(4)]
    others = [of("b", 50.0, 1), of("b", 50.0, 0), of("c", 60.0, 100)]
    moved = of("a", 99.0, 100)
    for each in (*flood, *others):
        queue.add(each)
    queue.add(moved, first=True)
    b_late, b, c = others
    assert list(queue) == [moved, flood[0], b, c, flood[1], b_late, flood[2], flood[3]]
    queue.shares.served(flood[0].request.share)
    flood[0].request.share.charge(15)
    queue.remove(flood[0])
    assert list(queue) == [moved, b, c, b_late, flood[1], flood[2], flood[3]]
    assert [queue.num_before(turn_of(99.0, 0), Tenant(name)) for name in "abcd"] == [7, 7, 1, 1]
    assert queue.has(b.request) and not queue.has(flood[0].request)
    queue.withdraw(b.request)
    assert not queue.has(b.request) and len(queue) == len(list(queue)) == 6


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.booleans(), st.booleans()), max_size=40))
def test_any_order_of_arrivals_and_departures_keeps_every_entry_once(
    events: list[tuple[str, int, bool, bool]],
) -> None:
    queue, here = WaitingQueue(), list[Any]()
    for tenant, tokens, is_first, leaves in events:
        if leaves and here:
            queue.remove(here.pop(tokens % len(here)))
        else:
            here.append(made := of(tenant, num_tokens=tokens))
            made.request.share = UNSHARED
            queue.add(made, first=is_first)
            made.request.share.charge(tokens)
        assert sorted(map(id, queue)) == sorted(map(id, here)) == sorted(map(id, queue.unordered))
        assert (len(queue), queue.num_tokens) == (len(here), sum(each.num_tokens for each in here))


def named(tenant: str, **fields: Any) -> Asked:
    return asked(**fields)._replace(tenant=Tenant(tenant))


def test_a_full_queue_displaces_a_request_of_the_tenant_with_most_waiting() -> None:
    door = Door()
    first, second, third = (door.wait(tenant=Tenant("a"), priority=-100) for _ in range(3))
    door.wait(tenant=Tenant("b"))
    door.make_room(named("c"))
    assert door.refused == [third], "the last one of the tenant with most"
    door.wait(tenant=Tenant("c"))
    with pytest.raises(Overloaded, match="4 requests wait already"):
        door.make_room(named("b", priority=1))  # it would have as many as the other: nobody gives up a place
    with pytest.raises(Overloaded):
        door.make_room(named("a", priority=0))
    door.make_room(named("a", priority=-200))
    assert door.refused == [third, second], "within its tenant by priority"
    assert first not in door.refused


def test_prompt_tokens_of_the_tenant_with_most_of_them_give_up_their_places() -> None:
    door = Door()
    large = [door.wait(40, tenant=Tenant("a")) for _ in range(2)]
    door.wait(10, tenant=Tenant("b"))
    door.make_room(named("c", num_tokens=30))
    assert door.refused == [large[1]]
    with pytest.raises(Overloaded, match="50 prompt tokens wait already"):
        door.make_room(named("c", num_tokens=60))


def test_requests_that_nodes_were_asked_for_keep_their_places() -> None:
    door = Door()
    for _ in range(4):
        door.wait(tenant=Tenant("a"), dispatched_at=1.0)
    with pytest.raises(Overloaded):
        door.make_room(named("b"))
    assert door.refused == []


def test_a_refused_tenant_comes_again_by_its_own_queue() -> None:
    """Refusals of one tenant do not put off another, and each gets its part of the grants."""
    door = Door()
    door.full(interval_s=0.1, service_s=1.0)
    for tenant in "aabb":
        door.wait(tenant=Tenant(tenant), dispatched_at=1.0)

    def after_s(tenant: str) -> float:
        with pytest.raises(Overloaded) as refused:
            door.queues.check_room(GROUP, named(tenant), 110.0)
        return refused.value.retry_after_s

    flood = [after_s("a") for _ in range(20)]
    assert flood == sorted(flood) and flood[-1] > 10 * flood[0]
    assert after_s("b") == pytest.approx(flood[0], rel=0.5)


# --- missing nodes: how long requests wait for one, and the error at the end -----------------------------------------


def node(num_pages: int = 100) -> Any:
    capacity = Capacity(num_pages=num_pages, page_size=16, max_running=8)
    model = SimpleNamespace(context_len=1000)
    hello = SimpleNamespace(capacity=capacity, model=model)
    return SimpleNamespace(hello=hello, routing_id=b"d0", welcomed_at=0.0, protocol=PROTOCOL_MAX)


def give_pages(of: Any, num_pages: int) -> None:
    """Let the node have a pool of this size."""
    of.hello.capacity = msgspec.structs.replace(of.hello.capacity, num_pages=num_pages)


class Group:
    """Nodes of both roles. Every prefill node forms a pair with every decode node."""

    key = SimpleNamespace(model="fake")
    page_size = 16
    context_len = 1 << 20
    layout = make_layout(16)
    names = PageNames(b"", 16, 0)
    tokenizer: Any = object()
    facts = GroupFacts()
    computes_locally = False

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.by_role = {"prefill": [node() for _ in range(prefill)], "decode": [node() for _ in range(decode)]}
        self.nodes: dict[bytes, Any] = {}

    def live(self, role: str) -> list[Any]:
        return self.by_role[role]

    def local_nodes(self) -> list[Any]:
        return []

    def pairs(self) -> Any:
        return ((prefill, decode) for prefill in self.by_role["prefill"] for decode in self.by_role["decode"])

    @property
    def can_serve(self) -> bool:
        return any(True for _ in self.pairs())

    def most_pages(self, role: str) -> int:
        return max((each.hello.capacity.num_pages for each in self.by_role[role]), default=0)


class Waiting:
    """One entry that waits up to 10 s for nodes. The queues look at it four times per second."""

    def __init__(self, group: Any, *, is_usable: bool = True, needs_decode: bool = True, **entry: Any) -> None:
        self.group, self.is_usable, self.now = group, is_usable, 100.0
        self.errors: list[Any] = []
        self.queues = Queues(Bounds(4, 100, 60.0, node_wait_s=10.0))
        request: Any = SimpleNamespace(
            is_over=False,
            created_at=0.0,
            priority=0,
            tenant=DEFAULT,
            group=group,
            prompt_ids=[5] * 160,
            cache_salt="",
            params=SimpleNamespace(max_tokens=100, grammar=None),
            needs_prompt_logprobs=False,
            sequences=[SimpleNamespace(received=[], num_left=100 if needs_decode else 1, finish_reason=None)],
        )
        self.entry: Any = Entry(request, (0,))
        self.queues.add(self.entry)
        for name, value in entry.items():
            setattr(self.entry, name, value)

    def after(self, seconds: float) -> list[Any]:
        """Let this much time pass and return the errors so far."""
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            pairs = list(self.group.pairs()) if self.is_usable else []
            refused = self.queues.stranded(self.group, pairs, lambda _: "pair p0 -> d0: secret words", self.now)
            self.errors += [error for _, error in refused]
        return self.errors


@pytest.mark.parametrize("missing", ["prefill", "decode", "both"])
def test_requests_without_a_node_end_after_node_wait_s_and_name_the_missing_role(missing: str) -> None:
    group = Group(prefill=missing == "decode", decode=missing == "prefill")
    waiting = Waiting(group)
    assert waiting.after(10.0) == []
    (error,) = waiting.after(0.5)[:1]
    words = "no prefill and no decode node is left" if missing == "both" else f"no {missing} node is left"
    assert isinstance(error, Unavailable) and words in str(error) and "10 s" in str(error)


def test_a_node_that_joins_in_time_resets_the_wait() -> None:
    waiting = Waiting(Group(decode=0))
    assert waiting.after(9.0) == []
    waiting.group.by_role["decode"].append(node())
    waiting.after(0.25)
    waiting.group.by_role["decode"].clear()
    assert waiting.after(9.0) == []
    assert len(waiting.after(2.0)[:1]) == 1


@pytest.mark.parametrize("change", [{"attempt": object()}, {"request": SimpleNamespace(is_over=True)}])
def test_ended_requests_and_open_reservations_are_not_stranded(change: dict[str, Any]) -> None:
    waiting = Waiting(Group(decode=0), **change)
    assert waiting.after(30.0) == []


def test_one_token_needs_no_decode_node() -> None:
    assert Waiting(Group(decode=0), needs_decode=False).after(30.0) == []
    assert Waiting(Group(prefill=0), needs_decode=False).after(30.0)


@pytest.mark.parametrize(("role", "num_pages"), [("prefill", 10), ("decode", 11)])
def test_a_request_waits_for_room_only_in_pools_that_are_large_enough(role: str, num_pages: int) -> None:
    """The prompt takes 10 pages of a prefill node and, with room to generate, 11 of a decode node."""
    group = Group(decode=2, prefill=2)
    for each in group.by_role[role]:
        give_pages(each, num_pages)
    assert Waiting(group).after(30.0) == []
    for each in group.by_role[role]:
        give_pages(each, num_pages - 1)
    assert "none has room for the 11 pages" in str(Waiting(group).after(30.0)[0])


def test_large_pools_that_form_no_pair_do_not_count() -> None:
    """A large prefill node works only with a small decode node, and the other way round."""
    group: Any = Group(decode=2, prefill=2)
    large_prefill, small_prefill = group.by_role["prefill"]
    large_decode, small_decode = group.by_role["decode"]
    for each in (small_prefill, small_decode):
        give_pages(each, 5)
    group.pairs = lambda: [(large_prefill, small_decode), (small_prefill, large_decode)]
    assert Waiting(group).after(30.0)


def test_requests_wait_for_unusable_pairs_and_the_error_hides_the_details() -> None:
    waiting = Waiting(Group(), is_usable=False)
    assert waiting.after(10.0) == []
    error = waiting.after(0.5)[0]
    assert isinstance(error, NodeFault) and "secret words" in str(error) and "secret words" not in error.shown


def test_new_requests_may_wait_if_the_group_served_lately() -> None:
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


def test_an_unusable_pair_does_not_count_as_serving() -> None:
    waiting = Waiting(Group(), is_usable=False)
    waiting.after(1.0)
    waiting.group.by_role["decode"].clear()
    assert not waiting.queues.may_wait(waiting.group, waiting.now)


def test_first_come_first_served(make_system: Callable[..., System]) -> None:
    """A large request that was refused is not starved by small ones behind it."""
    system = make_system(num_pages=16).up()
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(20) as pool:
        running = [pool.submit(system.complete, prompt="a " * 60) for _ in range(2)]
        decode = system.cluster.by_name("d0")
        wait_until(lambda: len(own(system.cluster.by_name("p0"), m.Prefill)) == 2)
        large = pool.submit(system.complete, prompt="b " * 100)
        wait_until(lambda: waiting(system) == 1)
        small = [pool.submit(system.complete, prompt="c") for _ in range(10)]
        wait_until(lambda: waiting(system) == 11)
        time.sleep(0.2)
        assert len(own(system.cluster.by_name("p0"), m.Prefill)) == 2, "a small request overtook a refused one"
        system.behaviour.hold.set()
        for future in (*running, large, *small):
            assert future.result()[0] == 200
    order = [prefill.rid for prefill in own(system.cluster.by_name("p0"), m.Prefill)]
    assert order.index(large.result()[1]["id"]) == 2
    assert len(own(decode, m.Reserve)) < 40, "the full node was asked over and over"


def test_a_full_queue_refuses_with_429_and_a_time_to_come_again(make_system: Callable[..., System]) -> None:
    system = make_system(router={"max_waiting": 3}, max_running=1).up()
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(10) as pool:
        served = [pool.submit(system.complete)]
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        served += [pool.submit(system.complete) for _ in range(3)]
        wait_until(lambda: waiting(system) == 3)
        status, body, headers = system.complete()
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(headers["retry-after"]) <= 60
        status, body, _ = system.complete(prompt=["a", "b", "c"])
        assert status == 429
        status, body, _ = system.complete(prompt=["a", "b", "c", "d"])  # more than may ever wait
        assert (status, body["error"]["param"]) == (400, "prompt")
        system.behaviour.hold.set()
        assert [future.result()[0] for future in served] == [200] * 4
    system.router.wait_idle()


# --- a router whose fake nodes are full ------------------------------------------------------------------------------


def waiting(system: System) -> Any:
    return system.router.call(lambda: system.router.router.dispatcher.queues.num_waiting)


@pytest.mark.timing
def test_a_request_that_fits_no_present_node_does_not_block_others(make_system: Callable[..., System]) -> None:
    """The only node that is large enough dies. Its request waits for another one; those behind it are served."""
    system = make_system(router={"node_wait_s": 30.0}, num_pages=8)
    system.cluster.add("prefill", "p0", capacity=Capacity(64, 16, 64))
    system.up(0, 1)
    system.cluster.add("decode", "large", capacity=Capacity(64, 16, 64))
    wait_until(lambda: system.router.call(lambda: len(system.router.router.dispatcher.registry.nodes) == 3))
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(system.complete, prompt=[5] * 200)
        wait_until(lambda: own(system.cluster.by_name("large"), m.Reserve))
        system.cluster.by_name("large").stop()
        system.cluster.nodes.pop()
        system.behaviour.hold.set()
        wait_until(lambda: waiting(system) == 1)
        begun = time.monotonic()
        assert [system.complete()[0] for _ in range(3)] == [200] * 3
        assert time.monotonic() - begun < 5
        assert not moved.done()
        system.cluster.add("decode", "large", capacity=Capacity(64, 16, 64))
        assert moved.result(30)[0] == 200


def busy(make_system: Callable[..., System], **router: Any) -> System:
    """Return a system with one slot, held until `behaviour.hold` is set."""
    system = make_system(router=router, max_running=1).up()
    system.behaviour.hold = threading.Event()
    return system


def first_runs(system: System) -> None:
    """Wait until a request has taken the only slot."""
    wait_until(lambda: own(system.cluster.by_name("p0"), m.Prefill))


@contextmanager
def clients(system: System, count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads for requests. The slot is freed at the end, also if the test fails."""
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        finally:
            system.behaviour.hold.set()


def order(system: System) -> list[str]:
    """Return the request ids in the order in which the prefill node received them."""
    return list(dict.fromkeys(message.rid for message in own(system.cluster.by_name("p0"), m.Prefill)))


def test_lower_priority_numbers_go_first_and_equal_ones_in_order(make_system: Callable[..., System]) -> None:
    system = busy(make_system)
    with clients(system, 8) as pool:
        futures = [pool.submit(system.complete)]
        first_runs(system)
        for place, priority in enumerate([0, 5, 0, -3, 5, -3]):
            futures.append(pool.submit(system.complete, priority=priority))
            wait_until(lambda place=place: waiting(system) == place + 1)
        system.behaviour.hold.set()
        ids = [future.result()[1]["id"] for future in futures]
    assert order(system) == [ids[place] for place in (0, 4, 6, 1, 3, 2, 5)]


def test_a_full_queue_makes_room_for_a_higher_priority(make_system: Callable[..., System]) -> None:
    system = busy(make_system, max_waiting=2)
    with clients(system, 8) as pool:
        served = [pool.submit(system.complete)]
        first_runs(system)
        served.append(pool.submit(system.complete))
        wait_until(lambda: waiting(system) == 1)
        last = pool.submit(system.complete, stream=True)
        wait_until(lambda: waiting(system) == 2)
        assert system.complete()[0] == 429, "a request of equal priority must not displace another"
        assert system.complete(priority=1)[0] == 429
        served.append(pool.submit(system.complete, priority=-1))
        status, body, headers = last.result()
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert "higher priority" in body["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        system.behaviour.hold.set()
        assert [future.result()[0] for future in served] == [200] * 3
    page = system.router.request("GET", "/metrics")[1].decode()
    assert 'baton_requests_total{model="fake",outcome="refused"} 3.0' in page
    assert 'outcome="failed"' not in page


def test_prompt_tokens_that_wait_are_bounded(make_system: Callable[..., System]) -> None:
    system = busy(make_system, max_waiting_tokens=30)
    with clients(system, 4) as pool:
        served = [pool.submit(system.complete)]
        first_runs(system)
        served.append(pool.submit(system.complete, prompt=[5] * 20))
        wait_until(lambda: waiting(system) == 1)
        status, body, headers = system.complete(prompt=[5] * 11)
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert "20 prompt tokens wait already; at most 30" in body["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        status, body, _ = system.complete(prompt=[5] * 31)
        assert (status, body["error"]["param"]) == (400, "prompt"), "it could never wait"
        served.append(pool.submit(system.complete, prompt=[5] * 10))
        wait_until(lambda: waiting(system) == 2)
        system.behaviour.hold.set()
        assert [future.result()[0] for future in served] == [200] * 3


def learned(system: System, *, interval_s: float, service_s: float) -> None:
    """Teach the router this pace, as if the nodes had been full for a while."""

    def learn() -> None:
        (group,) = system.router.router.dispatcher.registry.groups.values()
        pace = system.router.router.dispatcher.queues.pace(group)
        begun = time.monotonic() - 100 * interval_s
        pace.blocked_since, pace._granted_at = begun, begun
        for place in range(1, 101):
            pace.granted(begun + place * interval_s)
            pace.served(service_s, 10)

    system.router.call(learn)


@pytest.mark.timing
def test_requests_that_would_be_late_are_refused_at_once(make_system: Callable[..., System]) -> None:
    """The request's own timeout_s covers queue and service. The router's max_queue_s covers the queue alone."""
    system = busy(make_system, max_queue_s=8.0)
    with clients(system, 8) as pool:
        served = [pool.submit(system.complete)]
        first_runs(system)
        for place in range(3):
            served.append(pool.submit(system.complete))
            wait_until(lambda place=place: waiting(system) == place + 1)
        learned(system, interval_s=1.0, service_s=2.0)  # three wait before it: 4 s, and 2 s of service
        begun = time.monotonic()
        status, body, headers = system.complete(timeout_s=5.0)
        assert time.monotonic() - begun < 1.5, "it was not refused at once"
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        learned(system, interval_s=3.0, service_s=2.0)
        assert system.complete()[0] == 429, "the bound of the queue"
        assert system.complete(timeout_s=20.0, stream=True)[0] == 429
        learned(system, interval_s=1.0, service_s=2.0)
        served.append(pool.submit(system.complete, timeout_s=20.0))
        served.append(pool.submit(system.complete, timeout_s=5.0, priority=-1))  # none waits before it
        wait_until(lambda: waiting(system) == 5)
        system.behaviour.hold.set()
        assert [future.result()[0] for future in served] == [200] * 6
    system.router.wait_idle()


def test_a_late_request_is_refused_and_reaches_no_node(make_system: Callable[..., System]) -> None:
    system = busy(make_system)
    with clients(system, 8) as pool:
        running = pool.submit(system.complete)
        first_runs(system)
        late = pool.submit(system.complete, timeout_s=1.5)
        wait_until(lambda: waiting(system) == 1)
        learned(system, interval_s=0.01, service_s=1.4)
        status, body, _ = late.result()
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert "within its timeout_s" in body["error"]["message"]
        system.behaviour.hold.set()
        assert running.result()[0] == 200
    assert len(order(system)) == 1
