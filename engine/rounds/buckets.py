"""Buckets: batch sizes whose inputs are static, and the inputs of steps on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..device import kind_of
from ..state.block_tables import BlockTables
from ..work import CatchUp, Round
from .inputs import HostInputs, InputBlock
from .slots import missed_row


class Buckets:
    """Owns the inputs on the host: some blocks per bucket, since the device may not have read those of one step when
    the inputs of the next are written. A batch beyond the largest bucket gets a block of its own size."""

    def __init__(
        self,
        sizes: Sequence[int],
        num_blocks: int,
        *,
        num_slots: int,
        num_columns: int,
        num_spare: int,
        max_steps: int,
        device: torch.device,
    ) -> None:
        """`num_blocks` per bucket. Block tables have `num_columns`; a step may reach `num_spare` columns behind the
        pages of its sequences, which are padding."""
        self._device = device
        self._padding = num_slots
        self._num_spare = num_spare
        self._max_steps = max(1, max_steps)
        self._tables = BlockTables(num_slots + 1, num_columns)
        self._free = {size: [self._allocate(size) for _ in range(num_blocks)] for size in sorted(sizes)}

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of the buckets, smallest first."""
        return list(self._free)

    @property
    def free_blocks(self) -> list[InputBlock]:
        """Blocks of all buckets that no step uses."""
        return [block for free in self._free.values() for block in free]

    def allocate_on_device(self) -> list[InputBlock]:
        """Return one block per bucket on the device, for graphs."""
        return [self._allocate(size, on_host=False) for size in self._free]

    def fill_round(self, work: Round, least: int = 0) -> InputBlock:
        """Return a filled block of the smallest bucket that holds the round, and `least` and `work.least_seqs`
        sequences; rows behind the round's are padding."""
        block, inputs = self._take(work, max(least, work.least_seqs))
        num_seqs = len(work.slots)
        inputs.counts[:num_seqs], inputs.counts[num_seqs:] = work.limits, 0
        self._write_rows(inputs.kept_rows, work.slots, work.num_missed)
        if work.proposed:
            inputs.proposed[:num_seqs, : work.shape.num_steps] = work.proposed
        return block

    def fill_catch_up(self, work: CatchUp) -> InputBlock:
        """Return a filled block likewise."""
        block, inputs = self._take(work)
        num_seqs = len(work.slots)
        inputs.counts[:num_seqs], inputs.counts[num_seqs:] = work.num_missed, 0
        self._write_rows(inputs.kept_rows, work.slots, work.firsts)
        return block

    def free(self, block: InputBlock) -> None:
        """Take a block back, which the device has read."""
        self._free.get(block.num_seqs, []).append(block)

    def _take(self, work: Round | CatchUp, least: int = 0) -> tuple[InputBlock, HostInputs]:
        """Return a block with slots and block tables, and its inputs."""
        self._tables.apply(work.changes)
        num_seqs = len(work.slots)
        least = max(num_seqs, least)
        size = next((each for each in self._free if each >= least), num_seqs)
        free = self._free.get(size)
        block = free.pop() if free else self._allocate(size)
        num_columns = min(max(work.num_pages, default=0) + self._num_spare, self._tables.num_columns)
        inputs = block.on_host
        inputs.slots[:num_seqs], inputs.slots[num_seqs:] = work.slots, self._padding
        self._tables.copy_rows(work.slots, inputs.block_table[:, :num_columns])
        return block.using(num_columns), inputs

    def _write_rows(self, rows: NDArray[np.int64], slots: Sequence[int], num_before: Sequence[int]) -> None:
        """Write where each slot keeps a row after so many others; padding's row is its first."""
        num_seqs = len(slots)
        rows[:num_seqs] = missed_row(np.asarray(slots), np.asarray(num_before))
        rows[num_seqs:] = missed_row(np.asarray(self._padding), np.asarray(0))

    def _allocate(self, num_seqs: int, *, on_host: bool = True) -> InputBlock:
        device = "cpu" if on_host else self._device
        is_pinned = on_host and kind_of(self._device).is_apart
        return InputBlock.allocate(num_seqs, self._tables.num_columns, self._max_steps, device, pinned=is_pinned)
