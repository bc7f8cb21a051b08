"""Rows of sequences in several tensors at once: gathered, assigned, packed, and advanced at the end of a round.

Rounds read and write rows of each sequence, above all hidden states. A row is the part of a tensor at one index of its
first dimension. It may have any shape. Numbers of rows travel between a device and pinned memory of the host by small
copies. The caller must keep the host's memory until the copy is done, because torch's allocator does not know about the
copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..operations import Operation

_ALIGNMENT = 16  # bytes; for pointers that have less, kernels are compiled once more


def gather_rows_ref(tables: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """Return copies [n, ...] of the rows `index` [n] int64 of each of `tables`."""
    return [table.index_select(0, index) for table in tables]


def assign_rows_ref_(tables: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Write `rows` [n, ...] to the rows `index` [n] int64 of `tables`, which have the same width and dtype.

    If `index` names a row twice, the row gets parts of both new rows."""
    for table, new in zip(tables, rows, strict=True):
        table.index_copy_(0, index, new)


def packed_ref(tables: Sequence[Tensor]) -> Tensor:
    """Return copies of all of `tables` in one block of bytes, which one copy can take elsewhere; see `unpacked`."""
    block = empty_block(tables)
    for part, table in zip(unpacked(block, tables), tables, strict=True):
        part.copy_(table)
    return block


def _index_of(tables: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor] = ()) -> Tensor:  # noqa: ARG001
    return index


def _first(tables: Sequence[Tensor]) -> Tensor:
    return tables[0]


gather_rows = Operation("gather_rows", gather_rows_ref, by=_index_of)
assign_rows_ = Operation("assign_rows_", assign_rows_ref_, by=_index_of)
packed = Operation("packed", packed_ref, by=_first)


def empty_block(tables: Sequence[Tensor]) -> Tensor:
    """Return a block for `packed`, [num_bytes] uint8, not written yet."""
    return torch.empty(_offsets(tables)[-1], dtype=torch.uint8, device=tables[0].device)


def unpacked(block: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a block of `packed`, or of a copy of it. `like` has the shapes and dtypes that were packed."""
    return [
        block[start : start + table.nbytes].view(table.dtype).view(table.shape)
        for start, table in zip(_offsets(like), like, strict=False)
    ]


def _offsets(tables: Sequence[Tensor]) -> list[int]:
    """Return the bytes before each table, and the bytes of all."""
    offsets = [0]
    for table in tables:
        offsets.append(offsets[-1] + -(-table.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


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


def copy_numbers_ref_(target: Tensor, source: Tensor) -> Tensor:
    """Copy `source` to `target`, both contiguous and of one shape and dtype, without waiting; return `target`.

    The one on the host is pinned."""
    return target.copy_(source, non_blocking=True)


def copy_columns_ref_(target: Tensor, source: Tensor, num_columns: int) -> Tensor:
    """Copy the first `num_columns` columns of `source` to `target`, both [num_rows, width] and contiguous, without
    waiting; return `target`. The one on the host is pinned."""
    target[:, :num_columns].copy_(source[:, :num_columns], non_blocking=True)
    return target


def load_column_ref_(ints: Tensor, floats: Tensor, doubles: Tensor, numbers: Tensor, row: int) -> None:
    """Write `numbers` [num_ints + num_floats + num_doubles] int64, which may lie in pinned memory, to column `row` of
    `ints` [num_ints, num_rows] int64, `floats` [num_floats, num_rows] float32 and `doubles` [num_doubles, num_rows]
    float64, without waiting. The numbers behind the first num_ints are the bits of float64."""
    numbers = numbers.to(ints.device, non_blocking=True)
    ints[:, row] = numbers[: len(ints)]
    reals = numbers[len(ints) :].view(torch.float64)
    floats[:, row] = reals[: len(floats)]
    doubles[:, row] = reals[len(floats) :]


def _on_device(target: Tensor, source: Tensor, *_: int, **__: int) -> Tensor:
    return target if target.is_cuda else source


copy_numbers_ = Operation("copy_numbers_", copy_numbers_ref_, by=_on_device)
copy_columns_ = Operation("copy_columns_", copy_columns_ref_, by=_on_device)
load_column_ = Operation("load_column_", load_column_ref_)
