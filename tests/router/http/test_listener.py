"""The listener: all addresses of a host, and an address that is taken. test_descriptors.py floods it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from baton.router.http.descriptors import Descriptors
from baton.router.http.listener import HttpListener


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
