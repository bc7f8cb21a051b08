"""Rows of numbers on the host that kernels read over the bus: pinned memory that is used again and again."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import kind_of
from .copies import recorded_event

_NUM_ROWS = 1024


class PinnedRows:
    """Owns the rows, and gives them out in turn.

    torch's allocator does not know that a kernel reads a row, so it might give the memory to others before the kernel
    has run. Here the rows are two halves. Before the first row of a half is given out again, the device has done all
    work that was submitted up to the launch for the last row of this half.
    """

    def __init__(self, width: int, device: torch.device, num_rows: int = _NUM_ROWS) -> None:
        """`width`: numbers per row. `num_rows` is even."""
        assert num_rows % 2 == 0, num_rows
        self._device, self._width = device, width
        # each row begins at a multiple of 16 bytes, so that one compiled kernel reads all
        shape = num_rows, width + width % 2
        self._rows = torch.zeros(shape, dtype=torch.int64, pin_memory=kind_of(device).is_apart)
        self._next = 0
        self._done: list[torch.cuda.Event | None] = [None, None]  # when the device has read the rows of each half

    def take(self) -> Tensor:
        """Return a row [width] int64 to write, and to launch a kernel with on the current stream, before the next
        call."""
        half_size = len(self._rows) // 2
        half, place = divmod(self._next, half_size)
        if place == 0:
            self._done[1 - half] = recorded_event(self._device)
            before, self._done[half] = self._done[half], None
            if before is not None:
                before.synchronize()
        row = self._rows[self._next, : self._width]
        self._next = (self._next + 1) % len(self._rows)
        return row
