"""The host tier of a node with several ranks: each rank has the slots of its own part of the pages.

Rank 0 decides, and sends its calls to the other ranks between other work. So every rank copies a page at the same place
in its order of work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..tiers.host_tier import PageCopies, TimedLoad
from ..work import LoadPages, StorePages


class RankCopies:
    """Does the calls of rank 0 on all ranks. A `PageCopies`; times are those of rank 0."""

    def __init__(self, own: PageCopies, send: Callable[[StorePages | LoadPages], object]) -> None:
        """`own`: those of rank 0. `send` sends work to all others."""
        self._own, self._send = own, send

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

    def row(self, slot: int) -> np.ndarray:
        return self._own.row(slot)

    def fence(self) -> Callable[[], object]:
        return self._own.fence()

    def take_loads(self) -> list[TimedLoad]:
        return self._own.take_loads()


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
