"""The host tier of a node with several ranks: each rank has the slots of its own part of the pages.

Rank 0 decides, and sends its calls to the other ranks between other work. So every rank copies a page at the same place
in its order of work.

If the node writes pages to files, rank 0 maps the slots of all ranks, and its thread reads and writes them. Each rank
counts the calls that it has done in memory that rank 0 maps, too: so the thread knows when a slot may be used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import msgspec
import numpy as np

from ...metadata.wire.node_info import HostMemory
from ..tiers.cuda_copies import CudaCopies
from ..tiers.host_copies import HostCopies
from ..tiers.host_tier import PageCopies, TimedLoad
from ..tiers.pinned_memory import map_shared_memory, shared_memory
from ..work import LoadPages, StorePages

_LOOK_S = 0.0005  # between looks at the counts of other ranks, in the thread of files


class SlotPlaces(msgspec.Struct, frozen=True):
    """Where a rank's slots lie, and its count of calls. None: it has no slots of this kind."""

    kept: HostMemory | None
    tails: HostMemory | None
    count: HostMemory


class SharedSlots:
    """The slots of rank 1 or above, as rank 0 sees them. `note_call` is to be called after each of its calls."""

    def __init__(self, copies: HostCopies | CudaCopies) -> None:
        self._copies = copies
        self.places = SlotPlaces(*copies.places, shared_memory(8))
        self._count = map_shared_memory(self.places.count).view(np.int64)
        self._waits: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    def note_call(self) -> None:
        """Count a call of rank 0 when its copies are done."""
        self._waits.put(self._copies.fence())

    def _run(self) -> None:
        while True:
            self._waits.get()()
            self._count[0] += 1


class _MappedSlots:
    """The slots of another rank in this process."""

    def __init__(self, places: SlotPlaces, num_slots: int, num_tail_slots: int) -> None:
        self._kept, self._tails = _rows(places.kept, num_slots), _rows(places.tails, num_tail_slots)
        self._count = map_shared_memory(places.count).view(np.int64)

    @property
    def num_done(self) -> int:
        """Calls that the rank has done."""
        return int(self._count[0])

    def row(self, slot: int) -> np.ndarray:
        """Return the rank's part of a slot, uint8."""
        return self._kept[slot] if slot < len(self._kept) else self._tails[slot - len(self._kept)]


def _rows(where: HostMemory | None, num_slots: int) -> np.ndarray:
    return np.empty((num_slots, 0), np.uint8) if where is None else map_shared_memory(where).reshape(num_slots, -1)


class RankCopies:
    """Does the calls of rank 0 on all ranks. A `PageCopies`; times are those of rank 0."""

    def __init__(self, own: PageCopies, send: Callable[[StorePages | LoadPages], object]) -> None:
        """`own`: those of rank 0. `send` sends work to all others."""
        self._own, self._send_work = own, send
        self._others: list[_MappedSlots] = []
        self._num_calls = 0

    def share(self, places: Sequence[SlotPlaces]) -> None:
        """Map the slots of the other ranks, in their order, before any call. Raises OSError."""
        assert not self._num_calls, self._num_calls
        self._others = [_MappedSlots(each, self.num_slots, self.num_tail_slots) for each in places]

    @property
    def num_slots(self) -> int:
        return self._own.num_slots

    @property
    def num_tail_slots(self) -> int:
        return self._own.num_tail_slots

    @property
    def num_ahead(self) -> int:
        return self._own.num_ahead

    @property
    def is_settled(self) -> bool:
        return self._own.is_settled

    def store(self, pages: Sequence[int], slots: Sequence[int], *, is_ahead: bool = False) -> None:
        self._send(StorePages(pages, slots, is_ahead, awaits_ahead=False))
        self._own.store(pages, slots, is_ahead=is_ahead)

    def await_ahead(self) -> None:
        if self.num_ahead:
            self._send(StorePages((), (), is_ahead=False, awaits_ahead=True))
            self._own.await_ahead()

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        self._send(LoadPages(slots, pages))
        self._own.load(slots, pages)

    def rows(self, slot: int) -> list[np.ndarray]:
        return [*self._own.rows(slot), *(other.row(slot) for other in self._others)]

    def fence(self) -> Callable[[], object]:
        own, others, wanted = self._own.fence(), self._others, self._num_calls

        def wait() -> None:
            own()
            while any(other.num_done < wanted for other in others):
                time.sleep(_LOOK_S)

        return wait

    def take_loads(self) -> list[TimedLoad]:
        return self._own.take_loads()

    def _send(self, work: StorePages | LoadPages) -> None:
        self._num_calls += 1
        self._send_work(work)


def copy(copies: PageCopies, work: StorePages | LoadPages) -> None:
    """Do a call of rank 0 on another rank."""
    if isinstance(work, LoadPages):
        copies.load(work.slots, work.pages)
        copies.take_loads()  # nobody asks for the times
        return
    if work.awaits_ahead:
        copies.await_ahead()
    if work.pages:
        copies.store(work.pages, work.slots, is_ahead=work.is_ahead)
