"""Any host: pages as independent ZeroMQ messages of a few MiB, asked for one by one, a bounded number on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from ...errors import ProtocolError
from ...wire.messages import Pages, Pull
from ...wire.request import Unit, pack_ids
from ..memory import PageMemory
from .base import Landed, Move, Transport

MESSAGE_BYTES = 4 << 20  # a message holds as many pages as fit, one at least
MAX_IN_FLIGHT = 4


class ZmqTransport(Transport):
    """Sends Pull by `send`; `receive` copies the answers into place."""

    name: ClassVar[str] = "zmq"

    def __init__(self, memory: Sequence[PageMemory], send: Callable[[Pull], None]) -> None:
        super().__init__(memory)
        self._send = send
        self._pages_per_pull = max(1, MESSAGE_BYTES // self.page_bytes)
        self._in_flight: dict[tuple[Unit, bytes], list[Move]] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._queue) and len(self._in_flight) < MAX_IN_FLIGHT

    @property
    def is_waiting(self) -> bool:
        return bool(self._in_flight)

    def step(self, max_bytes: int) -> Iterator[Landed]:  # noqa: ARG002
        """Asks for as many of the queued pages as may be on the way."""
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
        num_bytes = len(moves) * self.page_bytes
        if data.nbytes != num_bytes or len(message.generations) != 8 * len(moves):
            raise ProtocolError(
                f"{len(moves)} pages of {message.unit} take {num_bytes} bytes and {8 * len(moves)} of generations, "
                f"there came {data.nbytes} and {len(message.generations)}",
                rid=message.unit.rid,
            )
        self._ask_again_before(message)
        generations: list[int] = np.frombuffer(message.generations, "<i8").tolist()
        return self._unpack(moves, generations, np.frombuffer(data, np.uint8))

    def forget(self, unit: Unit) -> None:
        super().forget(unit)
        self._in_flight = {key: moves for key, moves in self._in_flight.items() if key[0] != unit}

    def close(self) -> None:
        super().close()
        self._in_flight.clear()

    def _ask_again_before(self, message: Pages) -> None:
        """The message is an answer. Answers come in the order of their questions: those it has overtaken are lost."""
        while (key := next(iter(self._in_flight))) != (message.unit, message.indices):
            self._queue.extend(self._in_flight.pop(key))
        del self._in_flight[key]

    def _unpack(self, moves: list[Move], generations: list[int], frame: np.ndarray) -> Iterator[Landed]:
        for number, move in enumerate(moves):
            unpack_page(self.memory, move.target, frame[number * self.page_bytes : (number + 1) * self.page_bytes])
            yield Landed(move, generations[number])


def pack_pages(memory: Sequence[PageMemory], pages: Sequence[int]) -> np.ndarray:
    """The pages as one frame, uint8: per page each pool's [num_layers, page_layer_bytes], target then draft."""
    page_bytes = sum(pool.num_layers * pool.page_layer_bytes for pool in memory)
    frame = np.empty(len(pages) * page_bytes, np.uint8)
    at = 0
    for page in pages:
        for pool in memory:
            size = pool.num_layers * pool.page_layer_bytes
            frame[at : at + size].reshape(pool.num_layers, pool.page_layer_bytes)[:] = pool.pages[:, page]
            at += size
    return frame


def unpack_page(memory: Sequence[PageMemory], page: int, data: np.ndarray) -> None:
    """The inverse of `pack_pages` for one page, into this page number. `data` has exactly its bytes."""
    at = 0
    for pool in memory:
        size = pool.num_layers * pool.page_layer_bytes
        pool.pages[:, page] = data[at : at + size].reshape(pool.num_layers, pool.page_layer_bytes)
        at += size
