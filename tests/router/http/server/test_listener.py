"""The listener: all addresses of a host, and an address that is taken. A flood of it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.metadata.bus.descriptors import Descriptors
from baton.router.http.server.listener import HttpListener

from ...fake_nodes import FakeCluster, make_tokenizer

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
