"""Requests that are refused before any work is done on their prompts, or because they waited too long. Those that have
ended leave nothing behind."""

from __future__ import annotations

import gc
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.metadata.wire import messages as m
from baton.router.requests.request import Request

from ...conftest import System
from ...dispatching.test_runner import own, wait_until
from ...waiting.test_queue import busy, clients, first_runs


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "n": 2}, {"logprobs": 2, "echo": True}])
def test_a_finished_request_is_freed_without_a_collection(system: System, fields: dict[str, Any]) -> None:
    """Full collections are rare, and thousands of prompts would wait for one."""
    with no_collections() as new_requests:
        assert system.complete(**fields)[0] == 200
        wait_until(lambda: not new_requests())


def test_a_request_whose_client_left_is_freed_without_a_collection(system: System) -> None:
    system.behaviour.hold = threading.Event()
    address = urllib.parse.urlsplit(system.router.url)
    body = b'{"model": "fake", "prompt": "hello", "stream": true}'
    with no_collections() as new_requests:
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            wait_until(new_requests)
        wait_until(lambda: not new_requests())
    system.behaviour.hold.set()


def test_no_request_waits_longer_than_max_queue_s(make_system: Callable[..., System]) -> None:
    system = busy(make_system, max_queue_s=0.4)
    with clients(system, 4) as pool:
        running = pool.submit(system.complete)
        first_runs(system)
        begun = time.monotonic()
        status, body, _ = pool.submit(system.complete, prompt=["a", "b"]).result()
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert "no room for it in 0.4 s" in body["error"]["message"]
        assert time.monotonic() - begun >= 0.4
        system.behaviour.hold.set()
        assert running.result()[0] == 200
    system.router.wait_idle()


def test_the_other_prompts_of_a_running_request_may_wait_longer_than_max_queue_s(
    make_system: Callable[..., System],
) -> None:
    """A body with many prompts takes its time. When one prompt has nodes, the others are not refused."""
    system = busy(make_system, max_queue_s=2.0)
    with clients(system, 1) as pool:
        answer = pool.submit(system.complete, prompt=["a", "b", "c"])
        first_runs(system)
        time.sleep(2.5)
        system.behaviour.hold.set()
        assert answer.result()[0] == 200


def test_a_request_without_room_is_refused_before_its_prompt_is_read(make_system: Callable[..., System]) -> None:
    """The prompt is one that the router would refuse for another reason, and the refusal is counted."""
    system = busy(make_system, max_waiting=1)
    with clients(system, 2) as pool:
        served = [pool.submit(system.complete)]
        first_runs(system)
        served.append(pool.submit(system.complete))
        group = next(iter(system.router.router.dispatcher.registry.groups.values()))
        wait_until(lambda: system.router.call(lambda: len(system.router.router.dispatcher.queues.waiting_in(group))))
        assert system.complete(prompt=[10**9])[0] == 429
        assert len(own(system.cluster.by_name("p0"), m.Prefill)) == 1
        counted = b'baton_requests_total{model="fake",outcome="refused"} 1.0'
        assert counted in system.router.request("GET", "/metrics")[1]
        system.behaviour.hold.set()
        assert [each.result()[0] for each in served] == [200] * 2
    assert system.complete(prompt=[10**9])[0] == 400


@contextmanager
def no_collections() -> Iterator[Callable[[], list[Request]]]:
    """Stop collections of garbage. Yield a function that returns the requests in memory that were not there before."""
    gc.collect()
    gc.freeze()  # the function does not see what is there, of which there is much
    gc.disable()
    try:
        yield _requests
    finally:
        gc.enable()


def _requests() -> list[Request]:
    """Return the requests of clients. `isinstance` would ask objects of libraries for their class, and some warn."""
    return [each for each in gc.get_objects() if type(each) is Request and not each.is_canary]
