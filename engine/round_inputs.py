"""Inputs that the host writes before a round: one block of numbers, so that one copy moves it to the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .copies import to_device

_PER_SEQUENCE = 3  # columns of one number


class RoundInputs(NamedTuple):
    """Inputs of a bucket or of one batch. Rows beyond its sequences are padding. All tensors are views of `block`."""

    block: Tensor  # [num_seqs, 3 + max_steps + num_columns] int64
    num_used: int  # columns of `block` that a round may read; what others hold is of a round before
    slots: Tensor  # [num_seqs] int64
    limits: Tensor  # [num_seqs] int64, drafts that may be accepted; when catching up, rows that the drafter lacks
    missed_rows: Tensor  # [num_seqs] int64, where a row that the drafter does not see is kept (Slots.missed_row), or
    # when catching up, the oldest of those
    proposed: Tensor  # [num_seqs, max_steps] int64, by a drafter on the host
    block_table: Tensor  # [num_seqs, num_columns] int64

    @classmethod
    def allocate(
        cls, num_seqs: int, num_columns: int, max_steps: int, device: torch.device | str, *, pinned: bool = False
    ) -> RoundInputs:
        """Zeros."""
        width = _PER_SEQUENCE + max_steps + num_columns
        return cls._of(
            torch.zeros(num_seqs, width, dtype=torch.int64, device=device, pin_memory=pinned), width, max_steps
        )

    def using(self, num_columns: int) -> RoundInputs:
        """Itself, with so many columns of the table in use."""
        return self._replace(num_used=_PER_SEQUENCE + self.proposed.shape[1] + num_columns)

    def to(self, device: torch.device) -> RoundInputs:
        """Itself where it is there already."""
        if self.block.device == device:
            return self
        return self._of(to_device(self.block, device), self.num_used, self.proposed.shape[1])

    def copy_(self, source: RoundInputs) -> None:
        """Copy the columns in use from pinned memory to the device."""
        from ..kernels.triton_copies import copy_columns_

        copy_columns_(self.block, source.block, source.num_used)

    @classmethod
    def _of(cls, block: Tensor, num_used: int, max_steps: int) -> RoundInputs:
        slots, limits, missed_rows = block[:, :_PER_SEQUENCE].unbind(1)
        proposed, table = block[:, _PER_SEQUENCE:].tensor_split((max_steps,), dim=1)
        return cls(block, num_used, slots, limits, missed_rows, proposed, table)
