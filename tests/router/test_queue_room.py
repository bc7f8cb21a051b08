"""Who may wait, who gives up a place, and who is too late: the door to the queues, without nodes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.errors import Overloaded, RequestError
from baton.router.queue import MARGIN_S, PATIENCE_S, Asked, Bounds, Entry, Queues


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
