"""The end of a round: its results go into the rows of its sequences, and into one tensor for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .operations import Operation


class Columns(NamedTuple):
    """Columns of a table [num_columns, num_rows] int64 that holds one row per sequence."""

    counts: tuple[int, ...]  # grow by the number of tokens that a round brings
    last_token: int


def advance_ref_(
    table: Tensor,
    columns: Columns,
    index: Tensor,
    targets: Tensor,
    is_valid: Tensor,
    num_accepted: Tensor,
    resting: Tensor,
) -> Tensor:
    """Advance sequences, in place, by the tokens that a round brings; return the numbers that the host reads.

    The sequences have the rows `index` [num_seqs] int64 of `table`. Each gets `targets` [num_seqs, K + 1] int64 up to
    column `num_accepted` [num_seqs] int64. The last row of the table is padding, which several sequences may name. It
    is set to `resting` [num_columns].

    Returns [num_seqs, K + 3] int64: num_accepted, the number of True in `is_valid` [num_seqs, K + 1] bool before the
    first False, and targets."""
    rows = table.index_select(1, index)
    for column in columns.counts:
        rows[column] += num_accepted + 1
    rows[columns.last_token] = targets.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    table.index_copy_(1, index, rows)
    table[:, -1] = resting
    num_valid = is_valid.long().cumprod(1).sum(1)
    return torch.cat([torch.stack([num_accepted, num_valid], dim=1), targets], dim=1)


advance_ = Operation("advance_", advance_ref_)
