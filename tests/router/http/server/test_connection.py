"""Connections: those without a request are closed, a flood leaves descriptors to others, and a client that closes its
sending side gets its answer. Of the server's own log lines only those about faults of the router have tracebacks."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web import RequestPayloadError

from baton.metadata.bus.descriptors import Descriptors
from baton.metadata.wire import messages as m
from baton.router.http.server import connection
from baton.router.http.server.connection import ClientErrorFilter, HttpListener

from ...conftest import RunningRouter, System
from ...dispatching.test_runner import own, wait_until
from ...fake_nodes import FakeCluster, make_tokenizer


@pytest.mark.parametrize(
    ("error", "is_shown", "line"),
    [
        (ClientConnectionResetError("Cannot write to closing transport"), False, ""),
        (RequestPayloadError("400, message:\n  Can not decode"), False, "no proper HTTP: Can not decode"),
        (ContentEncodingError("bad gzip"), False, "no proper HTTP: bad gzip"),
        (KeyError("ours"), True, ""),
    ],
)
def test_only_our_own_faults_have_tracebacks(
    error: Exception, is_shown: bool, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    try:
        raise error
    except Exception:
        record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    assert ClientErrorFilter().filter(record) == is_shown
    assert line in caplog.text if line else not caplog.text


@pytest.mark.timing
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: local"])
@pytest.mark.parametrize("has_answer", [False, True])
def test_a_connection_without_a_request_is_closed(
    sent: bytes, has_answer: bool, make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is one whose client sends its header byte by byte."""
    monkeypatch.setattr(connection, "FIRST_REQUEST_S", 60.0 if has_answer else 0.4)
    monkeypatch.setattr("baton.router.main.KEEP_ALIVE_S", 0.4)
    host, port = make_system().router.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=120) as client:
        if has_answer:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 ")
        begun = time.monotonic()
        for index in range(len(sent)):
            client.sendall(sent[index : index + 1])
        assert client.recv(1 << 16) == b""
        assert 0.2 < time.monotonic() - begun < 10


LIMIT = 256


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


async def test_it_serves_and_gives_its_address_back() -> None:
    listener, second = HttpListener(Greeter, Descriptors(1000)), HttpListener(Greeter, Descriptors(1000))
    await listener.open("localhost", 0)
    family, address = listener.sockets[0].family, listener.sockets[0].getsockname()
    assert family in (socket.AF_INET, socket.AF_INET6)
    for _ in range(100):
        reader, writer = await asyncio.open_connection(*address[:2])
        assert await reader.read() == b"hello"
        writer.close()
    with pytest.raises(OSError, match="in use"):
        await second.open(address[0], address[1])
    listener.close()
    listener.close()
    await second.open(address[0], address[1])
    second.close()


PROGRAM = """
import asyncio, resource, sys, logging
resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[1])))
logging.basicConfig(level=logging.INFO)
import uvloop
from baton.router.config import RouterConfig
from baton.router.main import Router
async def main():
    router = Router(RouterConfig(port=0, node_address="tcp://127.0.0.1:*"))
    await router.start()
    print(router.url, router.node_address, flush=True)
    await asyncio.Event().wait()
uvloop.run(main())
"""


def ask(port: int, request: bytes, source: str = "127.0.0.2") -> bytes:
    with socket.create_connection(("127.0.0.1", port), 5, source_address=(source, 0)) as client:
        client.sendall(request)
        return client.recv(1 << 16)


def half_open(port: int) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))
    return client


@pytest.mark.timing
def test_half_open_connections_shut_nobody_out(tmp_path: Path) -> None:
    """Four times as many connections as the process may open, at the port of clients and at that of nodes."""
    log = tmp_path / "log"
    with log.open("wb") as errors:
        command = [sys.executable, "-c", PROGRAM, str(LIMIT)]
        router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    held: list[socket.socket] = []
    cluster: FakeCluster | None = None
    try:
        assert router.stdout is not None
        url, nodes = router.stdout.readline().decode().split()
        port, node_port = int(url.rsplit(":", 1)[1]), int(nodes.rsplit(":", 1)[1])
        cluster = FakeCluster(nodes, lambda prompt, choice: [300] * 100, tokenizer=make_tokenizer())
        cluster.add("prefill", "p0")
        body = b'{"model": "fake", "prompt": "hello", "max_tokens": 3}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        for kind in (node_port, port):  # at first there is no connection of a client that could make room
            held += [half_open(kind) for _ in range(2 * LIMIT)]
            begun = time.monotonic()
            assert b" 200 " in ask(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert time.monotonic() - begun < 3, (kind == port, log.read_text())
        cluster.add("decode", "d0")  # nodes can still join
        deadline = time.monotonic() + 8
        while b" 200 " not in (answer := ask(port, head % len(body) + body)):
            assert time.monotonic() < deadline, (answer, log.read_text()[-3000:])
            time.sleep(0.05)
    finally:
        for each in held:
            each.close()
        if cluster is not None:
            cluster.close()
        router.send_signal(signal.SIGKILL)
        router.wait()
        if router.stdout is not None:
            router.stdout.close()
    words = log.read_text()
    assert f"may open {LIMIT} files and connections (the soft limit was 100)" in words
    assert "127.0.0.1 has most of them" in words and "at the port of nodes over which no node has spoken" in words


PROMPTLY_S = 1.0  # on a machine that does other things as well; it takes less than a tenth
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def connect(router: RunningRouter) -> socket.socket:
    host, port = router.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=120)


def completion(*, stream: bool = False, version: str = "1.1", **more: Any) -> bytes:
    body = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 100, "stream": stream, **more}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_all(client: socket.socket) -> bytes:
    """Read until the router closes. Return the bytes without interim answers, of which there may be any number."""
    data = b"".join(iter(lambda: client.recv(1 << 16), b""))
    return data.replace(INTERIM, b"")


def text_of(answer: bytes) -> str:
    """Return the text of one answer, whole or streamed, whose framing must be right."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    if b"chunked" in head:
        body = b""
        while (size := int(rest.partition(b"\r\n")[0], 16)) > 0:
            chunk, rest = rest.partition(b"\r\n")[2][:size], rest.partition(b"\r\n")[2][size + 2 :]
            body += chunk
        assert rest == b"0\r\n\r\n"
        lines = [line for line in body.decode().split("\n") if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    return json.loads(rest)["choices"][0]["text"]


def held(make_system: Callable[..., System], **settings: Any) -> System:
    system = make_system(**settings).up()
    system.behaviour.hold = threading.Event()
    return system


def ask_in(system: System, phase: str, *, stream: bool, version: str = "1.1") -> socket.socket:
    """Send a request and wait until it is in this phase: queued, prefilling, or decoding with one token sent."""
    decode, prefill = system.cluster.by_name("d0"), system.cluster.by_name("p0")
    if phase == "prefilling":
        system.behaviour.answer_prefill = lambda _node, message: not message.rid.startswith("canary")
    client = connect(system.router)
    client.sendall(completion(stream=stream, version=version))
    wait_until(lambda: under_way(system))
    if phase != "queued":
        wait_until(lambda: own(decode, m.Reserve) and own(prefill, m.Prefill))
    if phase == "decoding" and stream:
        begun = b""
        while b"data: " not in begun:
            begun += client.recv(1 << 16)
    return client


def under_way(system: System) -> int:
    """Return the number of requests under way, without the one that the others wait for."""
    dispatcher = system.router.router.dispatcher
    return system.router.call(
        lambda: sum(not each.is_canary and each.priority == 0 for each in dispatcher.requests.values())
    )


# --- those that wait ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_s", [0.0, 0.6])
@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_answer(make_system: Callable[..., System], stream: bool, wait_s: float) -> None:
    system = held(make_system)
    with connect(system.router) as client:
        client.sendall(completion(stream=stream))
        client.shutdown(socket.SHUT_WR)
        time.sleep(wait_s)
        system.behaviour.hold.set()  # type: ignore[union-attr]
        assert text_of(read_all(client)) == system.text
    system.router.wait_idle()
    assert not own(system.cluster.by_name("d0"), m.Cancel)


@pytest.mark.parametrize("stream", [False, True])
def test_interim_bytes_are_ignored_by_other_http_parsers(make_system: Callable[..., System], stream: bool) -> None:
    system = held(make_system)
    client = http.client.HTTPConnection(system.router.url.removeprefix("http://"), timeout=20)
    body = {"model": "fake", "prompt": "hello", "max_tokens": 100, "stream": stream}
    client.request("POST", "/v1/completions", json.dumps(body))
    client.sock.shutdown(socket.SHUT_WR)
    timer = threading.Timer(0.6, system.behaviour.hold.set)  # type: ignore[union-attr]
    if not stream:  # interim answers come meanwhile, and http.client reads past them
        timer.start()
    response = client.getresponse()
    data = b""
    while stream and b":\n\n" not in data:
        data += response.read1()
    system.behaviour.hold.set() if stream else timer.join()  # type: ignore[union-attr]
    data += response.read()
    client.close()
    assert response.status == 200
    text = data.decode()
    if stream:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == system.text
        assert ":" in text.splitlines(), "nothing was sent meanwhile"
    else:
        assert json.loads(text)["choices"][0]["text"] == system.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_in_mid_answer_gets_the_rest(
    make_system: Callable[..., System], stream: bool
) -> None:
    """The stream has begun, so the router sends a comment to find out whether the client is there."""
    system = held(make_system)
    with connect(system.router) as client:
        client.sendall(completion(stream=stream))
        answer = b""
        while stream and b"data: " not in answer:
            answer += client.recv(1 << 16)
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        client.shutdown(socket.SHUT_WR)
        while stream and b":\n\n" not in answer:
            answer += client.recv(1 << 16)
        if not stream:
            time.sleep(0.6)
        system.behaviour.hold.set()  # type: ignore[union-attr]
        answer += read_all(client)
    assert text_of(answer) == system.text
    assert (b":\n\n" in answer) == stream
    system.router.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_of_a_queued_request_gets_its_answer(
    make_system: Callable[..., System], stream: bool
) -> None:
    system = held(make_system, max_running=1)
    with connect(system.router) as first, connect(system.router) as client:
        first.sendall(completion(priority=-1))
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        client.sendall(completion(stream=stream))
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: system.router.router.dispatcher.queues.num_waiting)
        time.sleep(0.5)
        assert under_way(system) == 1
        system.behaviour.hold.set()  # type: ignore[union-attr]
        assert text_of(read_all(client)) == system.text
    system.router.wait_idle()


def test_pipelined_requests_are_all_answered(make_system: Callable[..., System]) -> None:
    system = held(make_system)
    with connect(system.router) as client:
        client.sendall(completion() + completion(stream=True) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.2)
        system.behaviour.hold.set()  # type: ignore[union-attr]
        answer = read_all(client)
    heads = [b"HTTP/1.1 200 " + part for part in answer.split(b"HTTP/1.1 200 ")[1:]]
    assert [text_of(head) for head in heads[:2]] == [system.text] * 2
    assert heads[2].endswith(b'{"status":"ok"}')
    assert len(heads) == 3


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/debug/ledger"])
def test_half_closed_clients_get_answers_of_quick_routes(system: System, path: str, version: str) -> None:
    with connect(system.router) as client:
        client.sendall(f"GET {path} HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
        client.shutdown(socket.SHUT_WR)
        assert b" 200 OK\r\n" in read_all(client)


def test_a_half_closed_connection_without_a_request_is_closed(system: System) -> None:
    for sent in (b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with connect(system.router) as client:
            client.sendall(sent)
            if sent.endswith(b"\r\n\r\n"):
                assert b" 200 OK\r\n" in client.recv(1 << 16)
            client.shutdown(socket.SHUT_WR)
            assert read_all(client) == b""


@pytest.mark.timing
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_half_a_body_is_a_bad_request(system: System, version: str) -> None:
    begun = time.monotonic()
    with connect(system.router) as client:
        client.sendall(completion(version=version)[:-10])
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert answer.startswith(f"HTTP/{version} 400 ".encode()), answer
    assert b"the body cannot be read" in answer
    assert time.monotonic() - begun < 5


# --- those that are gone -----------------------------------------------------------------------------------------


def close(client: socket.socket) -> None:
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def shut_both(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_RDWR)


def shut_then_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)
    client.close()


PHASES = [
    ("queued", False),
    ("queued", True),
    ("prefilling", False),
    ("prefilling", True),
    ("decoding", False),
    ("decoding", True),
]


@pytest.mark.each_value
@pytest.mark.timing
@pytest.mark.parametrize("leave", [close, reset, shut_both, shut_then_close])
@pytest.mark.parametrize(("phase", "stream"), PHASES)
def test_a_client_that_leaves_cancels_its_request(
    make_system: Callable[..., System], phase: str, stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    system = held(make_system, max_running=1 if phase == "queued" else 64)
    first = connect(system.router)
    if phase == "queued":
        first.sendall(completion(priority=-1))
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
    client = ask_in(system, phase, stream=stream)
    begun = time.monotonic()
    leave(client)
    wait_until(lambda: not under_way(system))
    took_s = time.monotonic() - begun
    print(f"noticed after {1000 * took_s:.0f} ms")
    assert took_s < PROMPTLY_S
    client.close()
    system.behaviour.hold.set()  # type: ignore[union-attr]
    first.close()
    system.router.wait_idle()


@pytest.mark.timing
@pytest.mark.parametrize(("phase", "stream"), PHASES[2:])
def test_a_half_closed_client_that_leaves_later_cancels_its_request(
    make_system: Callable[..., System], phase: str, stream: bool
) -> None:
    """The client reads, so the router notices its leaving only by the next send."""
    system = held(make_system)
    client = ask_in(system, phase, stream=stream)
    client.shutdown(socket.SHUT_WR)
    client.settimeout(0.5)
    until = time.monotonic() + 0.7
    while time.monotonic() < until:
        try:
            client.recv(1 << 16)
        except TimeoutError:
            continue
    assert under_way(system) == 1
    begun = time.monotonic()
    client.close()
    wait_until(lambda: not under_way(system))
    assert time.monotonic() - begun < 2 + PROMPTLY_S
    system.behaviour.hold.set()  # type: ignore[union-attr]
    system.router.wait_idle()


@pytest.mark.timing
def test_http_1_0_has_no_interim_answers(make_system: Callable[..., System]) -> None:
    """Before the answer begins, the router cannot know whether such a client is there, and gives it up soon."""
    system = held(make_system)
    with ask_in(system, "decoding", stream=False, version="1.0") as client:
        begun = time.monotonic()
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
        assert time.monotonic() - begun < PROMPTLY_S
    with ask_in(system, "decoding", stream=True, version="1.0") as client:
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.5)
        system.behaviour.hold.set()  # type: ignore[union-attr]
        assert read_all(client).endswith(b"data: [DONE]\n\n")
    system.router.wait_idle()
