"""The pace of a group: what it learns from grants, and when it tells refused clients to come again.

A simulation follows: a server of some slots with a bounded queue, as queue.py has it, and clients with the retry
policy of the official openai package, whose own functions read the headers of the router's refusals.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from openai._models import FinalRequestOptions

from baton.metadata.errors import Overloaded
from baton.router.http.server.errors import response_of
from baton.router.waiting.pace import MAX_RETRY_S, NUM_SPREADS, SOON_S, Pace

from ..conftest import System
from ..dispatching.test_runner import wait_until


def full(interval_s: float, num_grants: int = 100) -> tuple[Pace, float]:
    """Return a pace and the time. The nodes of the group are full and grant at this interval."""
    pace, now = Pace(), 1000.0
    pace.blocked(now)
    for _ in range(num_grants):
        now += interval_s
        pace.granted(now)
    return pace, now


def test_the_wait_is_the_queue_times_the_interval() -> None:
    pace, _ = full(0.5)
    assert pace.wait_s(0) == pytest.approx(0.5)
    assert pace.wait_s(9) == pytest.approx(5.0)


def test_no_wait_is_expected_while_nodes_have_room() -> None:
    pace, now = full(0.5)
    pace.unblocked()
    assert pace.wait_s(100) == 0
    for _ in range(1000):  # grants with room tell how many come, not how many could
        now += 10.0
        pace.granted(now)
    pace.blocked(now)
    assert pace.wait_s(0) == pytest.approx(0.5)


def test_time_without_a_queue_is_no_interval() -> None:
    pace, now = full(0.5)
    pace.unblocked()
    pace.blocked(now + 500)
    pace.granted(now + 500.5)
    assert pace.wait_s(0) == pytest.approx(0.5)


def test_the_wait_of_the_first_counts_from_when_it_found_no_room() -> None:
    """Looking at the pace in between does not change it."""
    pace = Pace()
    for now in (10.0, 10.5, 11.9):
        pace.blocked(now)
    pace.granted(12.0)
    assert pace.wait_s(0) == pytest.approx(2.0)


def test_the_pace_follows_a_change() -> None:
    pace, now = full(0.1)
    for _ in range(50):
        now += 1.0
        pace.granted(now)
    assert pace.wait_s(0) == pytest.approx(1.0, rel=0.1)


def test_the_service_time_is_learned_by_request_length() -> None:
    pace = Pace()
    assert pace.service_s(1000) == 0
    for _ in range(100):
        pace.served(4.0, 40)
    assert pace.service_s(1000) == pytest.approx(4.0)
    assert pace.service_s(10) == pytest.approx(1.0), "a short one takes less"


def test_requests_of_varying_times_are_expected_to_take_more_than_the_mean() -> None:
    pace = Pace()
    for _ in range(200):
        pace.served(3.0, 10)
        pace.served(5.0, 10)
    assert pace.service_s(1000) == pytest.approx(4.0 + NUM_SPREADS * 1.0, rel=0.1)
    assert pace.service_s(5) == pytest.approx((4.0 + NUM_SPREADS * 1.0) / 2, rel=0.1)


def test_refused_clients_are_told_different_times() -> None:
    pace, now = full(0.5)
    times = [pace.retry_after_s(now, 1) for _ in range(20)]
    assert times == pytest.approx([0.5 * place for place in range(1, 21)])
    for _ in range(200):  # their times come; nodes are as full as before
        now += 0.5
        pace.granted(now)
    later = pace.retry_after_s(now, 1)
    assert later == pytest.approx(0.5), "promises that have passed do not count"


def test_a_faster_pace_brings_new_promises_nearer() -> None:
    """The earlier promises were made when a grant took two seconds."""
    pace, now = full(2.0)
    assert max(pace.retry_after_s(now, 1) for _ in range(20)) == pytest.approx(40.0)
    for _ in range(100):
        now += 0.05
        pace.granted(now)
    assert pace.retry_after_s(now, 1) < 20 * 0.06


def test_promises_fade_each_time_nodes_have_room_again() -> None:
    pace, now = full(1.0)
    for _ in range(30):
        pace.retry_after_s(now, 1)
    left: list[float] = []
    for _ in range(6):
        pace.unblocked()
        pace.unblocked()  # nothing happens as long as nodes have room
        left.append(pace.num_promised(now))
        pace.blocked(now)
    assert left == [15, 7, 3, 1, 0, 0]


def test_a_pace_is_learned_in_as_many_grants_as_there_are_slots() -> None:
    """There are two slots. Their requests begin together and take a second each."""
    pace = Pace()
    pace.blocked(0.0)
    told: list[float] = []
    for now in (1.0, 2.0, 3.0):
        for _ in range(2):
            pace.served(1.0, 10)
            pace.granted(now)
        told.append(pace.retry_after_s(now, 10, 2))
        pace._promises.clear()
    assert told == pytest.approx([5.0 * 2 / 4, 5.0 * 4 / 6, 5.0 * 6 / 8]), "of few samples less is believed"


def test_a_grant_that_is_overdue_counts() -> None:
    """Long requests follow short ones."""
    pace, now = full(0.05)
    before = pace.retry_after_s(now, 10)
    assert before == pytest.approx(0.5)
    assert pace.retry_after_s(now + 20, 10) > 5


def test_before_any_measure_refused_clients_come_again_soon_and_spread_out() -> None:
    pace = Pace()
    pace.blocked(0.0)
    told = [pace.retry_after_s(0.0, 1, 2) for _ in range(300)]
    assert sorted(set(told)) == told and SOON_S[0] < told[0] and told[-1] < SOON_S[1]
    assert max(np.histogram(told, 20)[0]) < 300 / 2
    assert pace.retry_after_s(10.0, 20, 2) == MAX_RETRY_S, "none of two has ended in ten seconds: five for each"


def test_no_client_is_sent_away_for_longer_than_the_bound() -> None:
    pace, now = full(30.0)
    assert max(pace.retry_after_s(now, 1000) for _ in range(10)) == MAX_RETRY_S
    assert math.isfinite(Pace().retry_after_s(now, 1))


OPTIONS = FinalRequestOptions(method="post", url="/")

Service = Callable[[random.Random], float]


@pytest.fixture(scope="module")
def official() -> OpenAI:
    return OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=1000)


@dataclass
class Server:
    """A simulated server with slots, places in the queue, and counts of its clients."""

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
        """Run until no client is left. Return the seconds since the first arrival."""
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
    """There are forty clients for two slots and four places."""
    server = Server(official, 2, 4, service(ideal_s * 2 / 40), knows_ms)
    for number in range(5):
        took_s = server.serve([0.0] * 40)
        assert server.num_served == 40
        limit = 1.55 if number == 0 else 1.25
        assert took_s < limit * ideal_s, f"burst {number}: {took_s:.1f} s for {ideal_s} s of work"
        assert server.num_refused < (3.0 if number == 0 else 1.8) * 40
        server.now += 1.0
    assert server.longest_told < 1.25 * ideal_s, "a client was told to wait for longer than all the work takes"


def test_very_short_work_ends_soon_once_the_pace_is_known(official: OpenAI) -> None:
    """The first burst is over before refused clients return, because the pace is not known yet. Later bursts use the
    pace."""
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


def test_requests_of_very_different_lengths_take_little_longer_than_the_work(official: OpenAI) -> None:
    """The bound holds for the mean of many bursts: one burst may have a request as long as all others together."""
    stretches: list[float] = []
    for seed in range(10):
        server = Server(official, 8, 16, exponential(0.5), rng=random.Random(seed))
        for _ in range(4):
            stretches.append(server.serve([0.0] * 200) / (200 * 0.5 / 8))
            assert server.num_refused < 4 * 200
            server.now += 1.0
    assert sum(stretches) / len(stretches) < 1.3 and max(stretches) < 1.8, stretches


def test_a_burst_of_longer_requests_changes_the_pace_and_so_does_its_end(official: OpenAI) -> None:
    """The first clients of a burst are told times that fit the burst before."""
    server = Server(official, 2, 4, always(0.2))
    server.serve([0.0] * 40)
    for seconds, limit_s in ((1.0, 30.0), (1.0, 25.0), (0.2, 20.0), (0.2, 5.0)):
        server.service = always(seconds)
        server.now += 1.0
        assert server.serve([0.0] * 40) < limit_s, seconds
        assert server.num_refused < 4 * 40


@pytest.mark.parametrize("max_retries", [0, 2, 1000])
def test_at_ten_times_the_capacity_nodes_stay_busy_and_clients_are_refused_a_few_times(
    official: OpenAI, max_retries: int
) -> None:
    """This holds whether or not refused clients come again."""
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


def test_clients_that_do_not_come_back_delay_no_other_client(official: OpenAI) -> None:
    """A thousand clients are refused and leave. Clients that come when nodes have room are told the present pace."""
    server = Server(official, 2, 4, always(0.5), max_retries=0)
    server.serve([0.0] * 40)
    server.serve([0.01 * place for place in range(1000)])
    server.max_retries, server.longest_told = 1000, 0.0
    server.now += 5.0
    assert server.serve([0.0] * 20) < 1.5 * 5
    assert server.longest_told < 1.5 * 5


def test_clients_that_come_back_when_told_are_all_served(make_system: Callable[..., System]) -> None:
    """There are twenty clients for two slots and three places, so fifteen or more are refused. Each comes again when it
    was told to."""
    system = make_system(router={"max_waiting": 3}, max_running=2).up()
    system.behaviour.step_s = 0.01  # a request takes about 0.2 s
    system.behaviour.hold = threading.Event()
    refused: list[int] = []

    def client(place: int) -> None:
        for _ in range(50):
            status, _, headers = system.complete(prompt=f"{place}")
            if status == 200:
                return
            assert status == 429
            refused.append(place)
            time.sleep(int(headers["retry-after"]))
        raise AssertionError("never got in")

    with ThreadPoolExecutor(20) as pool:
        served = [pool.submit(client, place) for place in range(20)]
        wait_until(lambda: len(set(refused)) >= 15, lambda: f"{refused}")
        system.behaviour.hold.set()
        for each in served:
            each.result()
