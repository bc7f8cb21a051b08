"""Block tables of slots, on the host: schedulers send changed columns only, and a round copies whole rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..work import TableChange


class BlockTables:
    """Owns one row of page numbers per slot. Columns behind a slot's pages are 0, the padding page."""

    def __init__(self, num_slots: int, num_columns: int) -> None:
        self.num_columns = num_columns
        self._pages = np.zeros((num_slots, num_columns), dtype=np.int64)
        self._num_pages = [0] * num_slots

    def apply(self, changes: Sequence[TableChange]) -> None:
        """Write the changed columns, and clear those behind them."""
        for change in changes:
            row, end = self._pages[change.slot], change.first + len(change.pages)
            assert change.first <= self._num_pages[change.slot] and end <= self.num_columns, (change.first, end)
            row[change.first : end] = change.pages
            row[end : max(end, self._num_pages[change.slot])] = 0
            self._num_pages[change.slot] = end

    def copy_rows(self, slots: Sequence[int], table: NDArray[np.int64]) -> None:
        """Copy the first columns of each slot's row to `table` [num_rows, num_columns], and clear the rows behind."""
        num_columns = table.shape[1]
        for row, slot in enumerate(slots):
            table[row] = self._pages[slot, :num_columns]
        table[len(slots) :] = 0
