"""Scarce descriptors: whoever holds most connections without a request loses one, and nobody who is being served."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from baton.metadata.bus.connection_monitor import Stranger
from baton.router.http import descriptors
from baton.router.http.descriptors import Descriptors, NodePort, group_of

from ..fake_nodes import FakeCluster, make_tokenizer

LIMIT = 256


class Fake:
    def __init__(self) -> None:
        self.is_closed = False

    def force_close(self) -> None:
        self.is_closed = True


def test_the_longest_waiting_of_the_address_with_most_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "YOUNG_S", 0.0)
    table = Descriptors(100)
    assert table.take(94) and not table.take(95), "none may be closed"
    greedy, modest = [Fake() for _ in range(5)], [Fake() for _ in range(3)]
    for each in modest:
        table.wait(each, "10.0.0.2")
    for each in greedy:
        table.wait(each, "10.0.0.1")
    table.remove(greedy[0])  # has a request
    table.remove(greedy[0])
    assert table.take(79) and not any(each.is_closed for each in greedy)
    assert table.take(80)
    assert [each.is_closed for each in greedy] == [False, True, False, False, False]
    table.wait(greedy[0], "10.0.0.1")  # is behind the others now
    assert table.take(95)
    assert [each.is_closed for each in greedy] == [False, True, True, False, False]
    for each in greedy:
        table.remove(each)
    table.wait(modest[0], "10.0.0.9")  # the client behind the proxy is known now
    for _ in range(3):
        table.wait(Fake(), "10.0.0.4")
    monkeypatch.setattr(descriptors, "YOUNG_S", 60.0)
    assert table.take(89)
    assert len(table._waiting["10.0.0.4"]) == 3, "their requests may be under way"  # type: ignore[attr-defined]
    assert table.take(90)
    assert len(table._waiting["10.0.0.4"]) == 2  # type: ignore[attr-defined]
    assert not any(each.is_closed for each in modest)
    table.make_room()
    assert table.is_reserved(90) and not table.is_reserved(89)


class FakeStranger(Fake):
    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address


def test_strangers_at_the_port_of_nodes_have_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "YOUNG_S", 0.0)
    port = NodePort(400)
    nodes, greedy = (
        [FakeStranger(address) for _ in range(count)] for address, count in (("10.0.0.1", 30), ("10.0.0.2", 400))
    )
    for each in nodes + greedy:
        port.come(cast(Stranger, each))
    assert sum(not each.is_closed for each in greedy) == 80 - len(nodes) and not any(each.is_closed for each in nodes)
    for each in nodes:
        port.go(cast(Stranger, each))
    assert all(each.is_closed for each in greedy[: 400 - 50]) and not greedy[-1].is_closed


def test_addresses_of_one_host_are_one() -> None:
    assert group_of("2001:db8::1") == group_of("2001:db8::ffff:2") != group_of("2001:db8:0:1::1")
    assert group_of("::ffff:10.0.0.1") == group_of("10.0.0.1") != group_of("10.0.0.2")
    assert group_of("") == ""


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
