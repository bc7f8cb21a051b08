"""How pages get from a peer's pool into ours. The receiver moves them; nobody writes into another's memory.

A transport belongs to one open link of a decode node. `HandoffClient` gives it moves and takes what landed; it knows
nothing of tickets, checksums or leases. Which one a link has, the two nodes settle in LinkHello and LinkWelcome.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from msgspec import Struct

from ...errors import ProtocolError
from ...wire.messages import Pages
from ...wire.request import Unit
from ..memory import PageMemory


class Move(Struct, frozen=True):
    """One page to fetch: number `source` in the peer's pool, `target` in ours."""

    unit: Unit
    index: int  # in the ticket
    source: int
    target: int
    generation: int  # as offered


class Landed(NamedTuple):
    """A page that has been copied, and the generation the source had after that. `checksums`: of our own copy, where
    the page lies in a pool on a GPU already; None: it lies in `memory`, unchecked."""

    move: Move
    generation: int
    checksums: bytes | None = None


class Transport(ABC):
    """Moves pages of one peer into `memory` (target pool, then draft)."""

    name: ClassVar[str]

    def __init__(self, memory: Sequence[PageMemory]) -> None:
        self.memory = tuple(memory)
        self.page_bytes = sum(pool.num_layers * pool.page_layer_bytes for pool in self.memory)
        self._queue: deque[Move] = deque()

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether `step` has something to do without waiting for the peer."""

    @property
    def is_waiting(self) -> bool:
        """Whether the peer owes an answer."""
        return False

    def fetch(self, moves: Iterable[Move]) -> None:
        """Queues moves; they land by later calls of `step` or `receive`."""
        self._queue.extend(moves)

    @abstractmethod
    def step(self, max_bytes: int) -> Iterator[Landed]:
        """Goes on with queued moves, copying about `max_bytes` at most. Each page is handed over before the next is
        copied, so that it is checked while it lies in the processor's cache (three times as fast)."""

    def receive(self, message: Pages, data: memoryview) -> Iterator[Landed]:  # noqa: ARG002
        """Takes the peer's pages, one after the other; who stops iterating leaves the rest unwritten. Raises
        ProtocolError when nobody asked for them."""
        raise ProtocolError(f"pages of {message.unit} arrived on a link that uses {self.name}", rid=message.unit.rid)

    def forget(self, unit: Unit) -> None:
        """After this no page of the unit is written any more: its target pages may be used again at once."""
        self._queue = deque(move for move in self._queue if move.unit != unit)

    def close(self) -> None:
        """Stops everything; what is mapped is unmapped."""
        self._queue.clear()
