"""What the host writes before a round, one block of numbers, so that one copy takes it to the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .copies import to_device

_PER_SEQUENCE = 3  # columns of one number


class RoundInputs(NamedTuple):
    """Of a bucket or of one batch. Rows beyond its sequences are padding. All but `block` are views of it."""

    block: Tensor  # [num_seqs, 3 + num_columns + max_steps] int64
    slots: Tensor  # [num_seqs] int64
    limits: Tensor  # [num_seqs] int64, drafts that may be accepted
    missed_rows: Tensor  # [num_seqs] int64, where a row that the drafter does not see is kept (Slots.missed_row)
    block_table: Tensor  # [num_seqs, num_columns] int64
    proposed: Tensor  # [num_seqs, max_steps] int64, by a drafter on the host

    @classmethod
    def allocate(
        cls, num_seqs: int, num_columns: int, max_steps: int, device: torch.device | str, *, pinned: bool = False
    ) -> RoundInputs:
        """Zeros."""
        width = (_PER_SEQUENCE + num_columns + max_steps) * num_seqs
        block = torch.zeros(width, dtype=torch.int64, device=device, pin_memory=pinned)
        return cls._of(block, num_seqs, num_columns)

    def to(self, device: torch.device) -> RoundInputs:
        """Itself where it is there already."""
        if self.block.device == device:
            return self
        return self._of(to_device(self.block, device), *self.block_table.shape)

    @classmethod
    def _of(cls, block: Tensor, num_seqs: int, num_columns: int) -> RoundInputs:
        sizes = [num_seqs] * _PER_SEQUENCE
        *single, table, proposed = block.split(
            [*sizes, num_columns * num_seqs, len(block) - num_seqs * (3 + num_columns)]
        )
        slots, limits, missed_rows = single
        return cls(block, slots, limits, missed_rows, table.view(num_seqs, num_columns), proposed.view(num_seqs, -1))
