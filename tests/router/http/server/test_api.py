"""Cancelling a request by its id."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.wire import messages as m
from baton.router.errors import NotFound
from baton.router.http.generation.serve import _abort
from baton.router.http.server.api import InFlight

from ...conftest import System
from ...dispatching.test_runner import own, wait_until
from .test_access import bearer


def in_flight(system: System) -> Any:
    return system.router.call(lambda: dict(system.router.router.api.in_flight._by_id))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["body", "header"])
@pytest.mark.parametrize("where", ["queued", "running"])
def test_cancel_by_id(make_system: Callable[..., System], where: str, by: str, stream: bool) -> None:
    system = make_system(max_running=1).up()
    system.behaviour.hold = threading.Event()
    request = system.router.request
    body = {"model": "fake", "prompt": "hello", "max_tokens": 100}
    with ThreadPoolExecutor(2) as pool:
        futures = []
        if where == "queued":
            futures.append(pool.submit(request, "POST", "/v1/completions", body))
            wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        given = {**body, "stream": stream}
        futures.append(pool.submit(request, "POST", "/v1/completions", given, {"x-request-id": "mine/7"}))
        wait_until(lambda: "mine/7" in in_flight(system))
        if where == "running":
            wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        rid = (
            next(name for name in reversed(in_flight(system)) if name.startswith("cmpl-")) if by == "body" else "mine/7"
        )
        status, answer, _ = request("DELETE", f"/v1/requests/{rid.replace('/', '%2F')}")
        assert (status, answer) == (200, {"id": rid, "cancelled": True})
        status, answer, _ = futures[-1].result()
        if status == 200:  # its stream had begun
            events = answer.decode().strip().split("\n\n")
            assert '"code":"cancelled"' in events[-1]
            assert sum("error" in event for event in events) == 1
        else:
            assert (status, answer["error"]["code"]) == (499, "cancelled")
        status, answer, _ = request("DELETE", f"/v1/requests/{rid.replace('/', '%2F')}")
        assert (status, answer["error"]["code"]) == (404, "not_found")
        assert rid in answer["error"]["message"]
        system.behaviour.hold.set()
        assert all(future.result()[0] == 200 for future in futures[:-1])
    system.router.wait_idle()
    assert not in_flight(system)


def test_a_request_that_waits_for_the_first_nodes_is_cancelled_by_the_id_that_its_client_gave(
    make_system: Callable[..., System],
) -> None:
    system = make_system()
    request = system.router.request
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(request, "POST", "/v1/chat/completions", body, {"x-request-id": "mine"})
        wait_until(lambda: early.done() or "mine" in in_flight(system))
        assert request("DELETE", "/v1/requests/mine")[0] == 200
        status, answer, _ = early.result()
    assert (status, answer["error"]["code"]) == (499, "cancelled")
    assert not in_flight(system) and not system.router.router.api.early.num_requests
    assert request("DELETE", "/v1/requests/mine")[0] == 404


def test_a_client_cannot_cancel_requests_of_another_key(make_system: Callable[..., System], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    system = make_system(router={"api_keys": str(keys), "admin_key": "boss"})
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    request = system.router.request
    wait_until(lambda: request("GET", "/ready", headers=bearer("boss"))[0] == 200)
    system.behaviour.hold = threading.Event()
    body = {"model": "fake", "prompt": "hello", "max_tokens": 100}
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(request, "POST", "/v1/completions", body, {"x-request-id": "same", **bearer("one")})
        theirs = pool.submit(request, "POST", "/v1/completions", body, {"x-request-id": "same", **bearer("two")})
        wait_until(lambda: len(own(system.cluster.by_name("d0"), m.Reserve)) == 2)
        assert request("DELETE", "/v1/requests/same", headers=bearer("one"))[0] == 200
        assert ours.result()[0] == 499
        assert request("DELETE", "/v1/requests/same", headers=bearer("one"))[0] == 404
        assert request("DELETE", "/v1/requests/same", headers=bearer("boss"))[0] == 200
        assert theirs.result()[0] == 499


def test_ended_requests_are_not_in_flight() -> None:
    """One of the prompts of a body has ended: a cancel reaches only the others. When all have ended, the id is unknown,
    though the answer is still being written."""
    aborted: list[Any] = []
    api: Any = SimpleNamespace(dispatcher=SimpleNamespace(abort=lambda request, _: aborted.append(request)))
    in_flight = InFlight()
    caller: Any = SimpleNamespace(is_admin=False)
    over, running = SimpleNamespace(is_over=True), SimpleNamespace(is_over=False)
    both: Any = [over, running]
    with in_flight.listed({"a", "b"}, caller, partial(_abort, api, both)):
        in_flight.cancel("b", caller)
        assert aborted == [running]
        running.is_over = True
        with pytest.raises(NotFound, match="'a'"):
            in_flight.cancel("a", caller)
    assert aborted == [running]
    with pytest.raises(NotFound):
        in_flight.cancel("a", caller)
