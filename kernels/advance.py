"""The end of a round: what it brought goes into the rows of its sequences, and into one tensor for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import gpu


class Columns(NamedTuple):
    """Of a table [num_columns, num_rows] int64 of sequences."""

    counts: tuple[int, ...]  # grow by the tokens that a round brings
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
    """The specification. Sequences in rows `index` [num_seqs] int64 of `table` get `targets` [num_seqs, K + 1] int64 up
    to column `num_accepted` [num_seqs] int64; the table's last row, which many may have, is set to `resting`
    [num_columns].

    Returns [num_seqs, K + 3] int64: num_accepted, how many of `is_valid` [num_seqs, K + 1] bool come before the first
    that is not, and targets."""
    rows = table.index_select(1, index)
    for column in columns.counts:
        rows[column] += num_accepted + 1
    rows[columns.last_token] = targets.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    table.index_copy_(1, index, rows)
    table[:, -1] = resting
    num_valid = is_valid.long().cumprod(1).sum(1)
    return torch.cat([torch.stack([num_accepted, num_valid], dim=1), targets], dim=1)


def advance_(
    table: Tensor,
    columns: Columns,
    index: Tensor,
    targets: Tensor,
    is_valid: Tensor,
    num_accepted: Tensor,
    resting: Tensor,
) -> Tensor:
    """`advance_ref_`, in one launch on CUDA."""
    if gpu.compiled(table):
        from .triton_advance import advance_ as advance_on_gpu_

        return advance_on_gpu_(
            table, columns.counts, columns.last_token, index, targets, is_valid, num_accepted, resting
        )
    return advance_ref_(table, columns, index, targets, is_valid, num_accepted, resting)
