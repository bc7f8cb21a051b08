"""Inputs that the host writes before a step on the device: one block of numbers, so that one copy moves them there.

A block has one row per sequence. `RoundInputs` and `CatchUpInputs` are the two ways to read it: each names its own
columns, and both end in the block table. `Buckets` are the batch sizes whose blocks are static.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.state.rows import copy_columns_
from ..device import kind_of, to_device
from ..work import MAX_MISSED, CatchUp, Round, TableChange
from .slots import missed_row


class BlockTables:
    """Owns one row of page numbers per slot, on the host, and one of tail pages if the model has such pages. Schedulers
    send changed columns only, and a round copies whole rows. Columns behind a slot's pages are 0, the padding page."""

    def __init__(self, num_slots: int, num_columns: int, *, has_tails: bool = False) -> None:
        self.num_columns = num_columns
        self._pages = np.zeros((num_slots, num_columns), dtype=np.int64)
        self._tails = np.zeros_like(self._pages) if has_tails else None
        self._num_pages = [0] * num_slots

    def apply(self, changes: Sequence[TableChange]) -> None:
        """Write the changed columns, and clear those behind them."""
        for change in changes:
            end = change.first + len(change.pages)
            assert change.first <= self._num_pages[change.slot] and end <= self.num_columns, (change.first, end)
            self._write(self._pages, change, change.pages)
            if self._tails is not None:
                self._write(self._tails, change, change.tail or ())
            self._num_pages[change.slot] = end

    def copy_rows(
        self, slots: Sequence[int], table: NDArray[np.int64], tail_table: NDArray[np.int64] | None = None
    ) -> None:
        """Copy the first columns of each slot's row to `table` [num_rows, num_columns], and clear the rows behind.
        `tail_table`: likewise, of tail pages."""
        num_columns = table.shape[1]
        for source, target in ((self._pages, table), (self._tails, tail_table)):
            if source is None or target is None:
                continue
            for row, slot in enumerate(slots):
                target[row] = source[slot, :num_columns]
            target[len(slots) :] = 0

    def _write(self, rows: NDArray[np.int64], change: TableChange, pages: Sequence[int]) -> None:
        """Write one change to a slot's row of a table, before its length is noted."""
        row, end = rows[change.slot], change.first + len(change.pages)
        row[change.first : end] = pages
        row[end : max(end, self._num_pages[change.slot])] = 0


_PER_SEQUENCE = 3  # columns of one number


class RoundInputs(NamedTuple):
    """Inputs of a round. Rows beyond its sequences are padding. All tensors are views of one block."""

    slots: Tensor  # [num_seqs] int64
    limits: Tensor  # [num_seqs] int64, drafts that may be accepted
    missed_rows: Tensor  # [num_seqs] int64, where a row that the drafter does not see is kept (Slots.missed_row)
    proposed: Tensor  # [num_seqs, max_steps] int64, by a drafter on the host
    block_table: Tensor  # [num_seqs, num_columns] int64
    tail_table: Tensor | None  # likewise, of tail pages; None: the model has none. It is a block of its own


class CatchUpInputs(NamedTuple):
    """Inputs of catching up. Rows beyond its sequences are padding. All tensors are views of one block."""

    slots: Tensor  # [num_seqs] int64
    num_missed: Tensor  # [num_seqs] int64, rows that the drafter lacks; 0 in padding
    first_rows: Tensor  # [num_seqs] int64, where the first of these rows is kept (Slots.missed_row)
    block_table: Tensor  # [num_seqs, num_columns] int64
    tail_table: Tensor | None  # as of a round


class HostInputs(NamedTuple):
    """Inputs of a round or of catching up, as the host writes them: views of one block in its memory."""

    slots: NDArray[np.int64]  # [num_seqs]
    counts: NDArray[np.int64]  # [num_seqs], `limits` of a round or `num_missed` of catching up
    kept_rows: NDArray[np.int64]  # [num_seqs], `missed_rows` of a round or `first_rows` of catching up
    proposed: NDArray[np.int64]  # [num_seqs, max_steps], of a round
    block_table: NDArray[np.int64]  # [num_seqs, num_columns]
    tail_table: NDArray[np.int64] | None  # likewise


class InputBlock(NamedTuple):
    """Memory for the inputs of one step of a bucket, or of one batch."""

    block: Tensor  # [num_seqs, 3 + max_steps + num_columns] int64
    max_steps: int
    num_used: int  # columns of `block` that the step may read; what others hold is of a step before
    tails: Tensor | None = None  # [num_seqs, num_columns] int64, the table of tail pages; None: the model has none

    @classmethod
    def allocate(
        cls,
        num_seqs: int,
        num_columns: int,
        max_steps: int,
        device: torch.device | str,
        *,
        pinned: bool = False,
        has_tails: bool = False,
    ) -> InputBlock:
        """Return zeros."""
        width = _PER_SEQUENCE + max_steps + num_columns
        block = torch.zeros(num_seqs, width, dtype=torch.int64, device=device, pin_memory=pinned)
        tails = None
        if has_tails:
            tails = torch.zeros(num_seqs, num_columns, dtype=torch.int64, device=device, pin_memory=pinned)
        return cls(block, max_steps, width, tails)

    @property
    def num_seqs(self) -> int:
        return self.block.shape[0]

    def fill_with_padding(self, slot: int) -> None:
        """Make every row one of padding, whose slot is `slot`; rows that the drafter does not see go to its place."""
        self.block.zero_()
        if self.tails is not None:
            self.tails.zero_()
        inputs = self.for_round
        inputs.slots.fill_(slot)
        inputs.missed_rows.fill_(slot * (MAX_MISSED + 1))

    @property
    def for_round(self) -> RoundInputs:
        slots, limits, missed_rows = self.block[:, :_PER_SEQUENCE].unbind(1)
        proposed, table = self.block[:, _PER_SEQUENCE:].tensor_split((self.max_steps,), dim=1)
        return RoundInputs(slots, limits, missed_rows, proposed, table, self.tails)

    @property
    def for_catch_up(self) -> CatchUpInputs:
        slots, num_missed, first_rows = self.block[:, :_PER_SEQUENCE].unbind(1)
        table = self.block[:, _PER_SEQUENCE + self.max_steps :]
        return CatchUpInputs(slots, num_missed, first_rows, table, self.tails)

    @property
    def on_host(self) -> HostInputs:
        """The inputs of a block in the memory of the host."""
        block, first = self.block.numpy(), _PER_SEQUENCE + self.max_steps
        tails = None if self.tails is None else self.tails.numpy()
        return HostInputs(block[:, 0], block[:, 1], block[:, 2], block[:, _PER_SEQUENCE:first], block[:, first:], tails)

    def using(self, num_columns: int) -> InputBlock:
        """Return the same block, with so many columns of the table in use."""
        return self._replace(num_used=_PER_SEQUENCE + self.max_steps + num_columns)

    def to(self, device: torch.device) -> InputBlock:
        """Return a copy on `device`, or the same block if it is there."""
        if self.block.device == device:
            return self
        tails = None if self.tails is None else to_device(self.tails, device)
        return self._replace(block=to_device(self.block, device), tails=tails)

    def copy_(self, source: InputBlock) -> None:
        """Copy the columns in use from pinned memory to the device."""
        copy_columns_(self.block, source.block, source.num_used)
        if self.tails is not None and source.tails is not None:
            copy_columns_(self.tails, source.tails, source.num_used - _PER_SEQUENCE - self.max_steps)


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
        has_tails: bool = False,
    ) -> None:
        """`num_blocks` per bucket. Block tables have `num_columns`; a step may reach `num_spare` columns behind the
        pages of its sequences, which are padding."""
        self._device = device
        self._padding = num_slots
        self._num_spare = num_spare
        self._max_steps = max(1, max_steps)
        self._has_tails = has_tails
        self._tables = BlockTables(num_slots + 1, num_columns, has_tails=has_tails)
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
        """Return a block of the smallest bucket that holds the catch-up, filled. Rows behind its own are padding. The
        caller frees the block."""
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
        tails = None if inputs.tail_table is None else inputs.tail_table[:, :num_columns]
        self._tables.copy_rows(work.slots, inputs.block_table[:, :num_columns], tails)
        return block.using(num_columns), inputs

    def _write_rows(self, rows: NDArray[np.int64], slots: Sequence[int], num_before: Sequence[int]) -> None:
        """Write where each slot keeps a row after so many others; padding's row is its first."""
        num_seqs = len(slots)
        rows[:num_seqs] = missed_row(np.asarray(slots), np.asarray(num_before))
        rows[num_seqs:] = missed_row(np.asarray(self._padding), np.asarray(0))

    def _allocate(self, num_seqs: int, *, on_host: bool = True) -> InputBlock:
        device = "cpu" if on_host else self._device
        is_pinned = on_host and kind_of(self._device).is_apart
        sizes = num_seqs, self._tables.num_columns, self._max_steps
        return InputBlock.allocate(*sizes, device, pinned=is_pinned, has_tails=self._has_tails)
