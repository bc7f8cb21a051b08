"""Transport `zmq`, for any two hosts: the decode node pulls pages as ZeroMQ messages of about 1 MiB.

Each Pull message asks for some pages, and each Pages message answers one. A bounded number of pulls is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from ...errors import ProtocolError
from ...wire.data_link import LinkWelcome, Pages, Pull
from ...wire.request import Unit, pack_ids
from ..memory import PageMemory, bytes_of, unpack_page
from ..ranks.shards import PagePart
from .base import Checked, Landed, Move, PullEnd, Transport

# A message holds as many pages as fit, and at least one. Heartbeats wait behind a message, so on a slow network it must
# not take long.
MESSAGE_BYTES = 1 << 20
MAX_IN_FLIGHT = 8  # servers of earlier releases drop a pull while 16 answers wait to be sent


class ZmqTransport(Transport):
    """Sends Pull messages by `send`; `receive` copies the answers into our pools."""

    name: ClassVar[str] = "zmq"

    def __init__(
        self, memory: Sequence[PageMemory], send: Callable[[Pull], None], part: PagePart | None = None
    ) -> None:
        super().__init__(memory, part)
        self._send = send
        self._pages_per_pull = max(1, MESSAGE_BYTES // self.page_bytes)
        self._in_flight: dict[tuple[Unit, bytes], list[Move]] = {}

    @classmethod
    def open(cls, end: PullEnd, welcome: LinkWelcome) -> ZmqTransport:  # noqa: ARG003
        """Return a transport that sends its pulls over the link. Cannot fail."""
        return cls(end.memory, end.send, end.part)

    @property
    def is_busy(self) -> bool:
        return bool(self._queue) and len(self._in_flight) < MAX_IN_FLIGHT

    @property
    def is_waiting(self) -> bool:
        return bool(self._in_flight)

    def step(self, max_bytes: int) -> Iterator[Landed]:  # noqa: ARG002
        """Send pulls for queued pages until MAX_IN_FLIGHT are in flight. Nothing lands here, but in `receive`."""
        while self.is_busy:
            moves = [self._queue.popleft()]
            while self._queue and self._queue[0].unit == moves[0].unit and len(moves) < self._pages_per_pull:
                moves.append(self._queue.popleft())
            pull = Pull(unit=moves[0].unit, indices=pack_ids([move.index for move in moves]))
            self._in_flight[pull.unit, pull.indices] = moves
            self._send(pull)
        return iter(())

    def receive(self, message: Pages, data: memoryview) -> Iterator[Landed]:
        moves = self._in_flight.get((message.unit, message.indices))
        if moves is None:
            raise ProtocolError(f"pages of {message.unit} that were not asked for", rid=message.unit.rid)
        whole = self._unsealed(data)
        if whole is None:
            self._end_pull(message)
            return iter([Landed(move, move.generation, checked=Checked(0)) for move in moves])
        return self._take(message, moves, whole)

    def forget(self, unit: Unit) -> None:
        super().forget(unit)
        self._in_flight = {key: moves for key, moves in self._in_flight.items() if key[0] != unit}

    def close(self) -> None:
        super().close()
        self._in_flight.clear()

    def _unsealed(self, data: memoryview) -> memoryview | None:
        """Return the bytes of pages that `receive` was given; None if they are damaged."""
        return data

    def _take(self, message: Pages, moves: list[Move], data: memoryview) -> Iterator[Landed]:
        num_bytes = sum(bytes_of(self.memory, move.target, self.part) for move in moves)
        if data.nbytes != num_bytes or len(message.generations) != 8 * len(moves):
            raise ProtocolError(
                f"{len(moves)} pages of {message.unit} take {num_bytes} bytes and {8 * len(moves)} of generations, "
                f"there came {data.nbytes} and {len(message.generations)}",
                rid=message.unit.rid,
            )
        self._end_pull(message)
        generations: list[int] = np.frombuffer(message.generations, "<i8").tolist()
        return self._unpack(moves, generations, np.frombuffer(data, np.uint8))

    def _end_pull(self, message: Pages) -> None:
        """Remove the pull that this message answers.

        Answers arrive in the order of the pulls, so those to earlier pulls are lost; their pages are queued again.
        """
        while (key := next(iter(self._in_flight))) != (message.unit, message.indices):
            self._queue.extend(self._in_flight.pop(key))
        del self._in_flight[key]

    def _unpack(self, moves: list[Move], generations: list[int], frame: np.ndarray) -> Iterator[Landed]:
        at = 0
        for number, move in enumerate(moves):
            start, at = at, at + bytes_of(self.memory, move.target, self.part)
            unpack_page(self.memory, move.target, frame[start:at], self.part)
            yield Landed(move, generations[number])
