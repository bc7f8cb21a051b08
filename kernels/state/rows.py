"""Copies of rows of several tensors at once.

Rounds read and write rows of each sequence, above all hidden states. A row is the part of a tensor at one index of its
first dimension. It may have any shape.
"""

from __future__ import annotations

from collections.abc import Sequence

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
