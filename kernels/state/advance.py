"""The end of a round: its results are written to the rows of its sequences, and to one tensor for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..operations import Operation


class Columns(NamedTuple):
    """Columns of a table [num_columns, num_rows] int64 that holds one row per sequence."""

    counts: tuple[int, ...]  # columns that grow by the number of tokens of a round
    last_token: int  # the column of the sequence's last token


def advance_ref_(
    table: Tensor,
    columns: Columns,
    index: Tensor,
    targets: Tensor,
    is_valid: Tensor,
    num_accepted: Tensor,
    resting: Tensor,
) -> Tensor:
    """Advance sequences in `table`, in place, by the tokens of a round, and return the numbers that the host reads.

    Sequence i has row index[i] of `table` [num_columns, num_rows] int64; `index` is [num_seqs] int64. It gets the first
    num_accepted[i] + 1 tokens of row i of `targets` [num_seqs, K + 1] int64; `num_accepted` is [num_seqs] int64. The
    last row of the table is padding, which several sequences may name. It is set to `resting` [num_columns] int64.

    The numbers are a new tensor [num_seqs, K + 3] int64: num_accepted, the number of True in `is_valid` [num_seqs,
    K + 1] bool before the first False, and targets."""
    rows = table.index_select(1, index)
    for column in columns.counts:
        rows[column] += num_accepted + 1
    rows[columns.last_token] = targets.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    table.index_copy_(1, index, rows)
    table[:, -1] = resting
    num_valid = is_valid.long().cumprod(1).sum(1)
    return torch.cat([torch.stack([num_accepted, num_valid], dim=1), targets], dim=1)


advance_ = Operation("advance_", advance_ref_)
