"""Slow clients: their requests are paused and hold nothing, and a client that reads nothing is cut off in time."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from baton.metadata.wire import messages as m
from baton.router.http.server import app
from baton.router.http.server.sse import limit_unread

from ...conftest import System
from ...dispatching.test_runner import own, wait_until

TOKENS = 4000  # more than a megabyte of events


@pytest.fixture(autouse=True)
def small_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernel take kilobytes instead of megabytes for a connection on loopback."""

    def limit_all(request: Any, seconds: float) -> None:
        request.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        limit_unread(request, seconds)

    monkeypatch.setattr(app, "limit_unread", limit_all)


def long_system(make_system: Callable[..., System], **router: Any) -> System:
    system = make_system(router={"max_unread_bytes": 20_000, **router}, context_len=20_000, num_pages=2_000)
    system.cluster.script = lambda prompt, choice: [300 + place % 7 for place in range(TOKENS)]
    system.behaviour.step_tokens = 20
    return system.up()


def open_stream(system: System, *, num_tokens: int = TOKENS, stream: bool = True) -> socket.socket:
    host, port = system.router.url.removeprefix("http://").rsplit(":", 1)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    asked = {"model": "fake", "prompt": "hello", "max_tokens": num_tokens, "return_token_ids": True}
    body = json.dumps({**asked, "logprobs": 5, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    client.sendall(head % len(body) + body)
    return client


def is_paused(system: System) -> Any:
    return system.router.call(lambda: any(each.is_paused for each in system.router.router.dispatcher.requests.values()))


@pytest.mark.timing
def test_a_client_that_does_not_read_holds_no_page_and_is_cut_off(make_system: Callable[..., System]) -> None:
    system = long_system(make_system, max_unread_s=2.0)
    decode = system.cluster.by_name("d0")
    before = psutil.Process().memory_info().rss
    with open_stream(system):
        wait_until(lambda: is_paused(system))
        begun = time.monotonic()
        wait_until(lambda: not decode.reserved and own(decode, m.Cancel))
        grown = psutil.Process().memory_info().rss - before
        assert grown < 64 << 20, f"{grown >> 20} MB were piled up"
        system.router.wait_idle()
        assert 0.5 < time.monotonic() - begun < 20
    assert system.complete(max_tokens=5)[0] == 200


def test_a_client_that_pauses_gets_the_whole_text(make_system: Callable[..., System]) -> None:
    system = long_system(make_system)
    with open_stream(system) as client:
        wait_until(lambda: is_paused(system))
        wait_until(lambda: not system.cluster.by_name("d0").reserved)
        client.settimeout(20)
        data = bytearray()
        while more := client.recv(1 << 20):
            data += more
    events = [line[6:] for line in data.splitlines() if line.startswith(b"data: {")]
    ids = [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]
    assert ids == [300 + place % 7 for place in range(TOKENS)], "a token was lost or came twice"
    assert b"data: [DONE]" in data
    assert len(own(system.cluster.by_name("p0"), m.Prefill)) >= 2
    system.router.wait_idle()


def test_a_whole_answer_is_dropped_if_its_client_does_not_read_it(make_system: Callable[..., System]) -> None:
    """Its request is over and holds nothing on nodes, but the answer itself must not be kept for ever."""
    system = long_system(make_system, max_unread_s=1.0)

    def connections() -> list[Any]:
        return [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]

    num_before = len(connections())
    with open_stream(system, stream=False) as client:
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        system.router.wait_idle()
        client_port = client.getsockname()[1]
        wait_until(lambda: not [each for each in connections() if each.raddr and each.raddr.port == client_port])
    assert len(connections()) <= num_before


@pytest.mark.parametrize("place", ["queued", "prefilling"])
def test_pausing_is_possible_in_every_phase(make_system: Callable[..., System], place: str) -> None:
    """Any caller may pause a request. All its choices are queued again afterwards."""
    system = make_system(max_running=2).up()
    dispatcher = system.router.router.dispatcher
    taken: list[Any] = []
    if place == "queued":
        refusal = m.Load(free_pages=0, running=1, waiting=0)
        system.behaviour.answer_reserve = lambda node, message: bool(
            not message.rid.startswith("canary")
            and (taken.append(message) or node.link.send(m.Reserved(message.rid, message.attempt, (), refusal)))
        )
    else:
        system.behaviour.answer_prefill = lambda node, message: (
            not message.rid.startswith("canary") and not taken.append(message)
        )
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(system.complete, n=2)
        wait_until(lambda: taken)
        (request,) = dispatcher.requests.values()
        system.router.call(lambda: dispatcher.set_paused(request, True))
        wait_until(lambda: not system.cluster.by_name("d0").reserved)
        assert system.router.call(lambda: dispatcher.queues.num_waiting) == 0
        system.behaviour.answer_reserve = system.behaviour.answer_prefill = None
        system.router.call(lambda: dispatcher.set_paused(request, False))
        status, body, _ = answer.result()
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [system.text] * 2
    system.router.wait_idle()
