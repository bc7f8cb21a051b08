"""A set of page names in one array: open addressing with linear probing.

Names are hashes already, so the low bits of a name are its slot. A removed name leaves no mark: the names behind it
move up. So the table is never rebuilt but to grow. It takes 16 to 32 bytes per name, where Python's set takes about
80, and the garbage collector does not look at it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

_MAX_FIRST = 1 << 18  # slots of a new table


class NameTable:
    """A set of 64-bit names. `num_expected`: how many it will hold without growing."""

    __slots__ = ("_mask", "_num", "_slots")

    def __init__(self, num_expected: int = 0) -> None:
        self._resize(min(_MAX_FIRST, 1 << max(16, 2 * num_expected - 1).bit_length()))
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, name: int) -> bool:
        slots, mask = self._slots, self._mask
        slot = name & mask
        while slots[slot]:
            if slots[slot] == name:
                return True
            slot = (slot + 1) & mask
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return len(self._slots) * self._slots.itemsize

    def add(self, names: Iterable[int]) -> None:
        """Add names. Zero means an empty slot and is left out."""
        slots, mask = self._slots, self._mask
        for name in names:
            slot = name & mask
            while (held := slots[slot]) and held != name:
                slot = (slot + 1) & mask
            if held or not name:
                continue
            slots[slot] = name
            self._num += 1
            if 2 * self._num > mask:
                self._grow()
                slots, mask = self._slots, self._mask

    def remove(self, names: Iterable[int]) -> None:
        """Remove the names that are there."""
        slots, mask = self._slots, self._mask
        for name in names:
            hole = name & mask
            while (held := slots[hole]) and held != name:
                hole = (hole + 1) & mask
            if not held:
                continue
            self._num -= 1
            slot = hole
            while held := slots[slot := (slot + 1) & mask]:
                if (slot - held) & mask >= (slot - hole) & mask:  # its own slot is not behind the hole
                    slots[hole] = held
                    hole = slot
            slots[hole] = 0

    def _grow(self) -> None:
        names = [name for name in self._slots if name]
        self._resize(2 * len(self._slots))
        self._num = 0
        self.add(names)

    def _resize(self, num_slots: int) -> None:
        self._slots, self._mask = array("Q", bytes(8 * num_slots)), num_slots - 1
