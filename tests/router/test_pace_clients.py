"""Pace among clients that obey it, on a clock of its own: how long all take, and how often they are refused.

A server of some slots and a bounded queue, as queue.py has it, and clients by the policy of the
official openai package: its own functions read the headers of the router's own refusals.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import OpenAI
from openai._models import FinalRequestOptions

from baton.metadata.errors import Overloaded
from baton.router.http.errors import response_of
from baton.router.pace import Pace

OPTIONS = FinalRequestOptions(method="post", url="/")
Service = Callable[[random.Random], float]


@pytest.fixture(scope="module")
def official() -> OpenAI:
    return OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=1000)


@dataclass
class Server:
    """Slots, places in the queue, and what became of the clients."""

    client: OpenAI
    num_slots: int
    num_places: int
    service: Service
    knows_ms: bool = True  # False: clients know the header Retry-After alone
    max_retries: int = 1000
    pace: Pace = field(default_factory=Pace)
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 0.0
    num_served: int = 0
    num_refused: int = 0
    num_given_up: int = 0
    num_early: int = 0  # served in the first 30 s
    longest_told: float = 0.0
    _running: int = 0
    _queue: list[int] = field(default_factory=list)
    _events: list[tuple[float, int, str, Any]] = field(default_factory=list)
    _num_events: int = 0

    def serve(self, arrivals: list[float]) -> float:
        """Plays until nobody is left; returns how long that took from the first arrival on."""
        self.num_served = self.num_refused = self.num_given_up = self.num_early = 0
        begun = self.now
        for at in arrivals:
            self._at(begun + at, "come", 0)
        last = begun
        while self._events:
            self.now, _, kind, value = heapq.heappop(self._events)
            if kind == "come":
                self._come(value)
            else:
                self._running -= 1
                self.num_served += 1
                self.num_early += self.now < begun + 30.0
                self.pace.served(value, 10)
                self._pump()
                last = self.now
        return last - begun

    def _at(self, at: float, kind: str, value: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, kind, value))

    def _come(self, num_tries: int) -> None:
        num_excess = len(self._queue) + 1 - self.num_places
        if num_excess <= 0 or self._running < self.num_slots:
            self._queue.append(num_tries)
            self._pump()
            return
        self.num_refused += 1
        if num_tries == self.max_retries:
            self.num_given_up += 1
            return
        after_s = self.pace.retry_after_s(self.now, num_excess, self._running)
        error = Overloaded("", retry_after_s=after_s)
        headers: Any = {name.lower(): value for name, value in response_of(error).headers.items()}
        if not self.knows_ms:
            del headers["retry-after-ms"]
        wait_s = self.client._calculate_retry_timeout(1000 - num_tries, OPTIONS, headers)
        self.longest_told = max(self.longest_told, wait_s)
        self._at(self.now + wait_s + 0.005 * self.rng.random(), "come", num_tries + 1)

    def _pump(self) -> None:
        while self._queue:
            if self._running == self.num_slots:
                self.pace.blocked(self.now)
                return
            self._queue.pop(0)
            self._running += 1
            self.pace.granted(self.now)
            took = self.service(self.rng)
            self._at(self.now + took, "done", took)
        self.pace.unblocked()


def always(seconds: float) -> Service:
    return lambda rng: seconds


def scattered(seconds: float) -> Service:
    return lambda rng: seconds * (0.5 + rng.random())


def exponential(seconds: float) -> Service:
    return lambda rng: rng.expovariate(1 / seconds)


@pytest.mark.parametrize("knows_ms", [True, False])
@pytest.mark.parametrize("service", [always, scattered])
@pytest.mark.parametrize("ideal_s", [10.4, 20.0, 40.0])
def test_a_burst_and_the_next_ones_take_little_longer_than_the_work(
    official: OpenAI, ideal_s: float, service: Callable[[float], Service], knows_ms: bool
) -> None:
    """Forty clients for two slots and four places."""
    server = Server(official, 2, 4, service(ideal_s * 2 / 40), knows_ms)
    for number in range(5):
        took_s = server.serve([0.0] * 40)
        assert server.num_served == 40
        limit = 1.55 if number == 0 else 1.25
        assert took_s < limit * ideal_s, f"burst {number}: {took_s:.1f} s for {ideal_s} s of work"
        assert server.num_refused < (3.0 if number == 0 else 1.8) * 40
        server.now += 1.0
    assert server.longest_told < 1.25 * ideal_s, "nobody is told to wait for longer than all the work takes"


def test_work_of_a_moment(official: OpenAI) -> None:
    """It is over before anybody could come again, as long as nothing is known of the pace; afterwards it is known."""
    server = Server(official, 2, 4, always(0.075))
    assert server.serve([0.0] * 40) < 4.0
    for _ in range(4):
        server.now += 1.0
        assert server.serve([0.0] * 40) < 1.5 * 1.5
        assert server.num_refused < 1.5 * 40
    server.knows_ms, server.longest_told = False, 0.0
    server.now += 1.0
    server.serve([0.0] * 40)
    assert server.longest_told <= 2.0, "a second and a half, in whole seconds"


def test_requests_of_very_unlike_lengths(official: OpenAI) -> None:
    """On the mean of many bursts; a single one may have a request that takes as long as all others together."""
    stretches: list[float] = []
    for seed in range(10):
        server = Server(official, 8, 16, exponential(0.5), rng=random.Random(seed))
        for _ in range(4):
            stretches.append(server.serve([0.0] * 200) / (200 * 0.5 / 8))
            assert server.num_refused < 4 * 200
            server.now += 1.0
    assert sum(stretches) / len(stretches) < 1.3 and max(stretches) < 1.8, stretches


def test_a_burst_of_longer_requests_and_back(official: OpenAI) -> None:
    """The first ones of a burst are told what was true of the burst before."""
    server = Server(official, 2, 4, always(0.2))
    server.serve([0.0] * 40)
    for seconds, limit_s in ((1.0, 30.0), (1.0, 25.0), (0.2, 20.0), (0.2, 5.0)):
        server.service = always(seconds)
        server.now += 1.0
        assert server.serve([0.0] * 40) < limit_s, seconds
        assert server.num_refused < 4 * 40


@pytest.mark.parametrize("max_retries", [0, 2, 1000])
def test_overload_of_ten_times_what_is_served(official: OpenAI, max_retries: int) -> None:
    """Nodes are never idle while so many come, whether or not they come again, and nobody asks all the time."""
    rng = random.Random(2)
    server = Server(official, 8, 16, exponential(0.5), max_retries=max_retries)
    arrivals = [0.0]
    while arrivals[-1] < 30.0:
        arrivals.append(arrivals[-1] + rng.expovariate(10 * 16))
    took_s = server.serve(arrivals)
    assert server.num_early > 0.9 * 16 * 30
    assert server.num_served + server.num_given_up == len(arrivals)
    assert server.num_refused / len(arrivals) <= min(max_retries + 1, 10)
    if max_retries == 1000:
        assert took_s < 1.25 * len(arrivals) / 16


def test_clients_that_do_not_come_back_hold_up_nobody(official: OpenAI) -> None:
    """A thousand are sent away for good. Those who come once nodes have room are told the present pace."""
    server = Server(official, 2, 4, always(0.5), max_retries=0)
    server.serve([0.0] * 40)
    server.serve([0.01 * place for place in range(1000)])
    server.max_retries, server.longest_told = 1000, 0.0
    server.now += 5.0
    assert server.serve([0.0] * 20) < 1.5 * 5
    assert server.longest_told < 1.5 * 5
