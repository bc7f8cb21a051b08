"""Inputs that the host writes before a step on the device: one block of numbers, so that one copy moves them there.

A block has one row per sequence. `RoundInputs` and `CatchUpInputs` are the two ways to read it: each names its own
columns, and both end in the block table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.state.copies import copy_columns_
from ..state.copies import to_device
from ..work import MAX_MISSED

_PER_SEQUENCE = 3  # columns of one number


class RoundInputs(NamedTuple):
    """Inputs of a round. Rows beyond its sequences are padding. All tensors are views of one block."""

    slots: Tensor  # [num_seqs] int64
    limits: Tensor  # [num_seqs] int64, drafts that may be accepted
    missed_rows: Tensor  # [num_seqs] int64, where a row that the drafter does not see is kept (Slots.missed_row)
    proposed: Tensor  # [num_seqs, max_steps] int64, by a drafter on the host
    block_table: Tensor  # [num_seqs, num_columns] int64


class CatchUpInputs(NamedTuple):
    """Inputs of catching up. Rows beyond its sequences are padding. All tensors are views of one block."""

    slots: Tensor  # [num_seqs] int64
    num_missed: Tensor  # [num_seqs] int64, rows that the drafter lacks; 0 in padding
    first_rows: Tensor  # [num_seqs] int64, where the first of these rows is kept (Slots.missed_row)
    block_table: Tensor  # [num_seqs, num_columns] int64


class HostInputs(NamedTuple):
    """Inputs of a round or of catching up, as the host writes them: views of one block in its memory."""

    slots: NDArray[np.int64]  # [num_seqs]
    counts: NDArray[np.int64]  # [num_seqs], `limits` of a round or `num_missed` of catching up
    kept_rows: NDArray[np.int64]  # [num_seqs], `missed_rows` of a round or `first_rows` of catching up
    proposed: NDArray[np.int64]  # [num_seqs, max_steps], of a round
    block_table: NDArray[np.int64]  # [num_seqs, num_columns]


class InputBlock(NamedTuple):
    """Memory for the inputs of one step of a bucket, or of one batch."""

    block: Tensor  # [num_seqs, 3 + max_steps + num_columns] int64
    max_steps: int
    num_used: int  # columns of `block` that the step may read; what others hold is of a step before

    @classmethod
    def allocate(
        cls, num_seqs: int, num_columns: int, max_steps: int, device: torch.device | str, *, pinned: bool = False
    ) -> InputBlock:
        """Return zeros."""
        width = _PER_SEQUENCE + max_steps + num_columns
        block = torch.zeros(num_seqs, width, dtype=torch.int64, device=device, pin_memory=pinned)
        return cls(block, max_steps, width)

    @property
    def num_seqs(self) -> int:
        return self.block.shape[0]

    def fill_with_padding(self, slot: int) -> None:
        """Make every row one of padding, whose slot is `slot`; rows that the drafter does not see go to its place."""
        self.block.zero_()
        inputs = self.for_round
        inputs.slots.fill_(slot)
        inputs.missed_rows.fill_(slot * (MAX_MISSED + 1))

    @property
    def for_round(self) -> RoundInputs:
        slots, limits, missed_rows = self.block[:, :_PER_SEQUENCE].unbind(1)
        proposed, table = self.block[:, _PER_SEQUENCE:].tensor_split((self.max_steps,), dim=1)
        return RoundInputs(slots, limits, missed_rows, proposed, table)

    @property
    def for_catch_up(self) -> CatchUpInputs:
        slots, num_missed, first_rows = self.block[:, :_PER_SEQUENCE].unbind(1)
        return CatchUpInputs(slots, num_missed, first_rows, self.block[:, _PER_SEQUENCE + self.max_steps :])

    @property
    def on_host(self) -> HostInputs:
        """The inputs of a block in the memory of the host."""
        block, first = self.block.numpy(), _PER_SEQUENCE + self.max_steps
        return HostInputs(block[:, 0], block[:, 1], block[:, 2], block[:, _PER_SEQUENCE:first], block[:, first:])

    def using(self, num_columns: int) -> InputBlock:
        """Return the same block, with so many columns of the table in use."""
        return self._replace(num_used=_PER_SEQUENCE + self.max_steps + num_columns)

    def to(self, device: torch.device) -> InputBlock:
        """Return a copy on `device`, or the same block if it is there."""
        if self.block.device == device:
            return self
        return self._replace(block=to_device(self.block, device))

    def copy_(self, source: InputBlock) -> None:
        """Copy the columns in use from pinned memory to the device."""
        copy_columns_(self.block, source.block, source.num_used)
