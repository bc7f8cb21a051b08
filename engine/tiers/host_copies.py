"""Copies between the pools of a node on a CPU and the slots of its host tier: done when the call returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...metadata.handoff.memory import PageMemory
from .host_tier import TimedLoad
from .pinned_memory import SlotMemory


class _Kind(NamedTuple):
    """Slots of kept pages, or of tail pages: one page of each of `pools` behind the other."""

    pools: Sequence[PageMemory]
    slots: np.ndarray  # uint8 [num_slots, slot_bytes]


class HostCopies:
    """Slots in host memory, of pages of `memory`. `is_shared`: other processes may map them, at `places`."""

    def __init__(
        self, memory: Sequence[PageMemory], num_slots: int, num_tail_slots: int = 0, *, is_shared: bool = False
    ) -> None:
        self.num_slots, self.num_tail_slots = num_slots, num_tail_slots
        kept, tails = [pool for pool in memory if not pool.first], [pool for pool in memory if pool.first]
        slots = [
            SlotMemory(num, slot_bytes(pools), is_pinned=False, is_shared=is_shared)
            for num, pools in ((num_slots, kept), (num_tail_slots, tails))
        ]
        self.places = (slots[0].where, slots[1].where)
        self._kept, self._tails = _Kind(kept, slots[0].slots), _Kind(tails, slots[1].slots)
        self._loads: list[TimedLoad] = []

    @property
    def is_settled(self) -> bool:
        return True

    @property
    def num_ahead(self) -> int:
        return 0

    def await_ahead(self) -> None:
        pass

    def store(self, pages: Sequence[int], slots: Sequence[int], *, is_ahead: bool = False) -> None:
        del is_ahead
        kind, rows, offset = *self._of(slots), 0
        for pool in kind.pools:
            end, own = offset + pool.page_bytes, np.asarray(pages) - pool.first
            kind.slots[rows, offset:end] = pool.pages[:, own].swapaxes(0, 1).reshape(len(own), -1)
            offset = end

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        begun = time.monotonic()
        kind, rows, offset = *self._of(slots), 0
        for pool in kind.pools:
            end, own = offset + pool.page_bytes, np.asarray(pages) - pool.first
            copied = kind.slots[rows, offset:end].reshape(len(own), pool.layout.num_layers, -1)
            pool.pages[:, own] = copied.swapaxes(0, 1)
            offset = end
        self._loads.append(TimedLoad(len(pages), time.monotonic() - begun))

    def rows(self, slot: int) -> list[np.ndarray]:
        return [self._kept.slots[slot] if slot < self.num_slots else self._tails.slots[slot - self.num_slots]]

    def fence(self) -> Callable[[], object]:
        return lambda: None

    def take_loads(self) -> list[TimedLoad]:
        loads, self._loads = self._loads, []
        return loads

    def _of(self, slots: Sequence[int]) -> tuple[_Kind, np.ndarray]:
        """Return the kind of slots, and their rows there."""
        is_tail = slots[0] >= self.num_slots
        return (self._tails if is_tail else self._kept), np.asarray(slots) - (self.num_slots if is_tail else 0)


def slot_bytes(pools: Sequence[PageMemory]) -> int:
    """Return the bytes of a slot of pages of these pools."""
    return sum(pool.page_bytes for pool in pools)
