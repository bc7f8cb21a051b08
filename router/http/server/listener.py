"""The sockets at which the router accepts HTTP connections.

A server of the event loop accepts all connections that wait before any of them is looked at. A flood would then take
all descriptors of the process at once. Here few are accepted in each round of the loop, so that room for them can be
made in time (metadata/bus/descriptors.py).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from ....metadata.bus.descriptors import Descriptors

BACKLOG = 1024  # connections that wait to be accepted
_PAUSE_S = 0.02  # without a free descriptor, and none that could become free
_CLOSING_S = 0.001  # until connections are closed that were told to


class HttpListener:
    """Listens on an address from `open` to `close`, in the running event loop."""

    def __init__(self, factory: Callable[[], asyncio.Protocol], descriptors: Descriptors) -> None:
        self._factory = factory
        self._descriptors = descriptors
        self._loop = asyncio.get_running_loop()
        self._opening = set[asyncio.Task[object]]()
        self.sockets: list[socket.socket] = []

    async def open(self, host: str, port: int) -> None:
        """Listen on all addresses of a host. Raises OSError for one that is taken or unknown."""
        found = await self._loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self.sockets.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.setblocking(False)
                listening.bind(address)
        except OSError:
            self.close()
            raise
        for listening in self.sockets:
            listening.listen(BACKLOG)
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Stop listening. Connections that were accepted stay open. May be called twice."""
        for listening in self.sockets:
            if listening.fileno() >= 0:
                self._loop.remove_reader(listening)
                listening.close()
        self.sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(self._descriptors.accepts_per_round):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is free, or the network has failed
                pause_s = _CLOSING_S if self._descriptors.make_room() else _PAUSE_S
                self._loop.remove_reader(listening)
                self._loop.call_later(pause_s, self._go_on, listening)
                return
            if not self._descriptors.take(connection.fileno()):
                connection.close()
                continue
            connection.setblocking(False)
            task = self._loop.create_task(self._serve(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _go_on(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)

    async def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the client has left
            await self._loop.connect_accepted_socket(self._factory, connection)
