"""Who may wait: the bounds of the queues, and a stop for requests that would wait for nothing.

A request is refused with 429 where the queues are full, by count or by prompt tokens, and where it would be late by its
group's present pace (pace.py). One that has become late leaves the queue before it costs a node anything. So nodes work
for those who still want the answer, however many ask. A full queue makes room for a request of higher priority by
refusing those whose turn comes last.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..metadata.errors import BatonError, Overloaded, RequestError
from .node import Group
from .pace import Pace
from .queue import Entry, WaitingQueue, turn_of
from .request import Request

MARGIN_S = 0.15  # of what is counted as in time: an answer's way through busy processes
PATIENCE_S = 0.25  # who has not waited so long is not given up as late: nodes may have room this moment


class Bounds(NamedTuple):
    """What may wait: requests and prompt tokens of all groups, and how long a request may."""

    num_requests: int
    num_tokens: int
    wait_s: float


class Asked(NamedTuple):
    """What an HTTP request asks for, as far as waiting goes. `num_tokens`: of its prompts; `max_tokens`: of each."""

    num_requests: int
    num_tokens: int
    max_tokens: int
    priority: int
    timeout_s: float


class Intake:
    """The door to the waiting queues, which admission.py owns. `fail` ends a request with an error."""

    def __init__(
        self, bounds: Bounds, queues: Mapping[Group, WaitingQueue], fail: Callable[[Request, BatonError], None]
    ) -> None:
        self._bounds = bounds
        self._queues = queues
        self._fail = fail
        self._paces: defaultdict[Group, Pace] = defaultdict(Pace)

    @property
    def num_waiting(self) -> int:
        """Entries that wait, over all groups."""
        return sum(map(len, self._queues.values()))

    @property
    def num_waiting_tokens(self) -> int:
        """Their prompt tokens."""
        return sum(queue.num_tokens for queue in self._queues.values())

    def pace(self, group: Group) -> Pace:
        """How fast a group serves."""
        return self._paces[group]

    def forget(self, group: Group) -> None:
        """The group is no more."""
        self._paces.pop(group, None)

    def check_room(self, group: Group, asked: Asked) -> None:
        """Raises Overloaded, with an honest guess of when to come again, when this may not wait now or would be late;
        RequestError when it may never.

        Those that wait behind it, its priority being higher, do not stand in its way: see `make_room`.
        """
        self._check_size(asked)
        now = time.monotonic()
        queue, pace = self._queues[group], self._paces[group]
        behind = queue.fresh_after(turn_of(now, asked.priority))
        num_excess = self._num_excess(asked) - len(behind)
        if num_excess > 0:
            words = f"{self.num_waiting} requests wait already; at most {self._bounds.num_requests} may"
            raise self._overloaded(words, group, now, num_excess)
        num_tokens = self._num_excess_tokens(asked) - sum(entry.num_tokens for entry in behind)
        if num_tokens > 0:
            words = f"requests with {self.num_waiting_tokens} prompt tokens wait already; at most "
            words += f"{self._bounds.num_tokens} tokens may"
            raise self._overloaded(words, group, now, -(-len(queue) * num_tokens // max(1, queue.num_tokens)))
        num_before = queue.num_before(turn_of(now, asked.priority))
        wait_s, service_s = pace.wait_s(num_before), pace.service_s(asked.max_tokens)
        patience_s = min(self._bounds.wait_s, asked.timeout_s - service_s - MARGIN_S)
        if wait_s and wait_s > patience_s:
            num_excess = round((wait_s - max(0.0, patience_s)) * (num_before + 1) / wait_s)
            words = f"{num_before} requests wait before this one: about {wait_s:.1f} s, and {service_s:.1f} s more to "
            words += f"be served; it may wait {self._bounds.wait_s:.1f} s, and last {asked.timeout_s:.1f} s in all"
            raise self._overloaded(words, group, now, num_excess)

    def make_room(self, group: Group, asked: Asked) -> None:
        """`check_room`, right before `submit`: where the queues are full, those behind give up their places to it."""
        self.check_room(group, asked)
        for entry in self._queues[group].fresh_after(turn_of(time.monotonic(), asked.priority)):
            if self._num_excess(asked) <= 0 and self._num_excess_tokens(asked) <= 0:
                return
            self.refuse(entry.request, "its place in the queue went to a request of higher priority")

    def refuse(self, request: Request, reason: str) -> None:
        """Ends a request that waits, since there is no room for it."""
        self._fail(request, self._overloaded(reason, request.group, time.monotonic(), 1))

    def is_late(self, entry: Entry, now: float) -> bool:
        """Whether a request has waited so long that it would miss its deadline, going by how long others take."""
        request = entry.request
        if not entry.is_fresh or request.deadline is None or now - request.created_at < PATIENCE_S:
            return False
        service_s = self._paces[request.group].service_s(request.params.max_tokens)
        return now + service_s + MARGIN_S > request.deadline

    def refuse_late(self, group: Group, now: float) -> None:
        """Ends all requests of a group that are late. To be called a few times a second."""
        for request in [entry.request for entry in self._queues[group] if self.is_late(entry, now)]:
            if request.deadline is not None and now <= request.deadline:  # else it just ends by its deadline
                self.refuse(request, "nodes are busy: it would not be done within its timeout_s any more")

    def served(self, request: Request, now: float) -> None:
        """A request is over, complete or not: what it took tells how long others will take."""
        if request.dispatched_at is not None and not request.is_canary:
            self._paces[request.group].served(now - request.dispatched_at, request.num_generated)

    def _overloaded(self, words: str, group: Group, now: float, num_excess: int) -> Overloaded:
        """A refusal, with the moment when the client should come again."""
        num_running = sum(node.num_units for node in group.live("decode"))
        num_running = num_running or sum(node.num_prompts for node in group.live("prefill"))
        return Overloaded(words, retry_after_s=self._paces[group].retry_after_s(now, num_excess, num_running))

    def _check_size(self, asked: Asked) -> None:
        """Raises RequestError for what may never wait."""
        if asked.num_requests > self._bounds.num_requests:
            words = f"{asked.num_requests} prompts; at most {self._bounds.num_requests} requests may wait"
            raise RequestError(f"prompt: {words}", param="prompt")
        if asked.num_tokens > self._bounds.num_tokens:
            words = f"{asked.num_tokens} prompt tokens; requests of at most {self._bounds.num_tokens} may wait"
            raise RequestError(f"prompt: {words}", param="prompt")

    def _num_excess(self, asked: Asked) -> int:
        return self.num_waiting + asked.num_requests - self._bounds.num_requests

    def _num_excess_tokens(self, asked: Asked) -> int:
        return self.num_waiting_tokens + asked.num_tokens - self._bounds.num_tokens
