"""More requests than nodes can serve: who gets in, who is told to come again, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from baton.metadata.wire import messages as m

from .conftest import System
from .fake_nodes import FakeNode
from .test_admission import waiting
from .test_runner import is_canary, own, wait_until


def busy(make_system: Callable[..., System], **router: Any) -> System:
    """One slot, held until `behaviour.hold` is set."""
    system = make_system(router=router, max_running=1).up()
    system.behaviour.hold = threading.Event()
    return system


def first_runs(system: System) -> None:
    """The one slot is taken, and whoever took it waits no more."""
    wait_until(lambda: own(system.cluster.by_name("p0"), m.Prefill))


@contextmanager
def clients(system: System, count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for requests. Whatever the test finds, the slot comes free before they are waited for."""
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        finally:
            system.behaviour.hold.set()


def order(system: System) -> list[str]:
    """Ids in the order in which prefill got them."""
    return list(dict.fromkeys(message.rid for message in own(system.cluster.by_name("p0"), m.Prefill)))


def test_lower_numbers_go_first_and_equal_ones_in_order(make_system: Callable[..., System]) -> None:
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
        assert system.complete()[0] == 429, "an equal one is in nobody's way"
        assert system.complete(priority=1)[0] == 429
        served.append(pool.submit(system.complete, priority=-1))
        status, body, headers = last.result(5)
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
    """The router has seen the nodes full for a while, at this pace."""

    def learn() -> None:
        (group,) = system.router.router.dispatcher.registry.groups.values()
        pace = system.router.router.dispatcher.queues.pace(group)
        begun = time.monotonic() - 100 * interval_s
        pace.blocked_since, pace._granted_at = begun, begun
        for place in range(1, 101):
            pace.granted(begun + place * interval_s)
            pace.served(service_s, 10)

    system.router.call(learn)


def test_who_would_be_late_is_refused_at_once(make_system: Callable[..., System]) -> None:
    """The request's own timeout_s counts, queue and service together; so does the router's bound on the queue alone."""
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


def test_who_has_become_late_costs_no_node_anything(make_system: Callable[..., System]) -> None:
    system = busy(make_system)
    with clients(system, 8) as pool:
        running = pool.submit(system.complete)
        first_runs(system)
        late = pool.submit(system.complete, timeout_s=1.5)
        wait_until(lambda: waiting(system) == 1)
        learned(system, interval_s=0.01, service_s=1.4)
        status, body, _ = late.result(5)
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert "within its timeout_s" in body["error"]["message"]
        system.behaviour.hold.set()
        assert running.result()[0] == 200
    assert len(order(system)) == 1


def test_timeout_s(make_system: Callable[..., System]) -> None:
    system = make_system(router={"request_timeout_s": 5.0}).up()
    system.behaviour.hold = threading.Event()
    for bad in (0, -1, 5.1, "soon", float("nan")):
        status, body, _ = system.complete(timeout_s=bad)
        assert (status, body["error"]["param"]) == (400, "timeout_s"), body
    assert "limit of 5 s" in system.complete(timeout_s=6)[1]["error"]["message"]
    status, body, headers = system.complete(timeout_s=0.3)
    assert (status, body["error"]["type"]) == (504, "timeout_error")
    assert "0.3 s" in body["error"]["message"]
    assert headers["x-should-retry"] == "false"
    system.router.wait_idle()


def test_who_waits_for_a_node_that_was_taken_for_dead_gets_in(
    make_system: Callable[..., System],
) -> None:
    """As on a busy machine: it was lost after it had taken a reservation, and joins anew with nothing of before."""
    system = make_system(max_running=1).up()
    dispatcher = system.router.router.dispatcher
    taken: list[m.Reserve] = []

    def take(node: FakeNode, message: m.Reserve) -> bool:
        if is_canary(message) or taken:
            return False
        taken.append(message)
        node.reserved[(message.rid, 0, message.attempt)] = message
        return True  # the answer is lost

    system.behaviour.answer_reserve = take
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(system.complete) for _ in range(3)]
        wait_until(lambda: taken)
        system.router.call(
            lambda: [
                dispatcher.registry.lose(node, "dead", time.monotonic())
                for node in list(dispatcher.registry.nodes.values())
                if node.num_units
            ]
        )
        assert [future.result()[0] for future in futures] == [200] * 3
    system.router.wait_idle()


def test_most_who_come_back_when_told_get_in(make_system: Callable[..., System]) -> None:
    """Twenty clients for two slots and a queue of three. Each tries again when it was told to, and not before."""
    system = make_system(router={"max_waiting": 3}, max_running=2).up()
    system.behaviour.step_s = 0.01  # a request takes about 0.2 s
    tries: list[int] = []

    def client(place: int) -> int:
        time.sleep(0.02 * place)
        for num_tries in range(1, 20):
            status, _, headers = system.complete(prompt=f"{place}")
            if status == 200:
                return num_tries
            assert status == 429
            time.sleep(int(headers["retry-after"]))
        raise AssertionError("never got in")

    with ThreadPoolExecutor(20) as pool:
        tries = list(pool.map(client, range(20)))
    again = [each for each in tries if each > 1]
    assert again, "nobody was refused"
    assert sum(each == 2 for each in again) >= 0.7 * len(again), tries


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_priorities(system: System, path: str) -> None:
    given = {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    for bad in (101, -101, 1.5, "high", True):
        status, body, _ = system.router.request("POST", path, {"model": "fake", **given, "priority": bad})
        assert (status, body["error"]["param"]) == (400, "priority"), body
    for good in (100, -100, 0, None):
        status, _, _ = system.router.request(
            "POST", path, {"model": "fake", "max_tokens": 1, **given, "priority": good}
        )
        assert status == 200
