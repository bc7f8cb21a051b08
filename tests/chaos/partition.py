"""TCP proxies between the processes of a cluster, which can slow, hold, drop or cut the traffic."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Coroutine
from typing import Any, Literal

Weather = Literal["fair", "slow", "held", "lossy", "cut", "hole"]  # hole: between hosts, for large packets


class Line:
    """A listening port whose connections are forwarded to `target`. Any thread may set `weather`."""

    def __init__(self, target: int, rng: random.Random) -> None:
        self.target = target
        self.weather: Weather = "fair"
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.num_connections = 0
        self._rng = rng

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self.listener)
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            if self.weather == "cut":
                return
            from_there, there = await asyncio.open_connection("127.0.0.1", self.target)
            self.num_connections += 1
            tasks = [asyncio.create_task(self._pump(*way)) for way in ((reader, there), (from_there, writer))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        except OSError:
            pass  # the target does not listen: the connection ends, as it would without the proxy
        finally:
            for end in (writer, there):
                if end is not None:
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes in one direction until an end closes or the weather is `cut`.

        If bytes were lost, the connection is closed once the weather clears, because no byte may follow a gap.
        """
        has_lost = False
        while True:
            try:
                data = await asyncio.wait_for(reader.read(1 << 16), 0.05)
            except TimeoutError:
                data = None
            while self.weather == "held":
                await asyncio.sleep(0.02)
            if self.weather == "cut" or data == b"":
                return
            if self.weather == "lossy":
                has_lost = has_lost or data is not None
                continue
            if has_lost:
                return
            if data is not None:
                if self.weather == "slow":
                    await asyncio.sleep(0.05 + 0.2 * self._rng.random())
                writer.write(data)
                await writer.drain()


class Lines:
    """The lines of a cluster, served by one thread."""

    def __init__(self, seed: int) -> None:
        self._lines: dict[tuple[str, ...], Line] = {}
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._tasks: list[Any] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="lines", daemon=True)
        self._thread.start()

    def open(self, ends: tuple[str, ...], target: int) -> Line:
        """Open a line from the first process to a port of the second, of which a third word names a rank."""
        line = self._lines[ends] = Line(target, self._rng)
        self._tasks.append(asyncio.run_coroutine_threadsafe(self._quietly(line.serve()), self._loop))
        return line

    def __iter__(self) -> Any:
        return iter(self._lines)

    def __getitem__(self, ends: tuple[str, ...]) -> Line:
        return self._lines[ends]

    def clear(self) -> None:
        """Set fair weather on all lines."""
        for line in self._lines.values():
            line.weather = "fair"

    def close(self) -> None:
        """Close all connections. May be called twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @staticmethod
    async def _end() -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @staticmethod
    async def _quietly(work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await work
