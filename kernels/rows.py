"""Rows of several tensors at once: what rounds read and write of each sequence, hidden states above all.

A row is what a tensor has under one index of its first dimension, of any shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import gpu

_ALIGNMENT = 16  # bytes; for pointers that have less, kernels are compiled once more


def gather_rows(tables: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """Rows `index` [n] int64 of each of `tables`, copies [n, ...]; in one launch on CUDA for up to four tables."""
    if not tables or not gpu.compiled(index):
        return [table.index_select(0, index) for table in tables]
    from . import triton_rows

    rows = [table.new_empty((len(index), *table.shape[1:])) for table in tables]
    triton_rows.copy_rows_(rows, tables, of=index)
    return rows


def assign_rows_(tables: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """The inverse: `rows` [n, ...] go to the rows `index` [n] int64 of `tables`, which are as wide and of their dtypes;
    a row that is named twice has parts of either."""
    if tables and gpu.compiled(index):
        from . import triton_rows

        triton_rows.copy_rows_(tables, rows, to=index)
        return
    for table, new in zip(tables, rows, strict=True):
        table.index_copy_(0, index, new)


def packed(tables: Sequence[Tensor]) -> Tensor:
    """All of `tables` in one block of bytes, so that one copy takes them elsewhere; `unpacked` finds them there."""
    block = torch.empty(_offsets(tables)[-1], dtype=torch.uint8, device=tables[0].device)
    parts = unpacked(block, tables)
    if gpu.compiled(block):
        from . import triton_rows

        triton_rows.copy_rows_(parts, tables)
    else:
        for part, table in zip(parts, tables, strict=True):
            part.copy_(table)
    return block


def unpacked(block: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a block of `packed`, or of a copy of it; `like` in shapes and dtypes what was packed."""
    return [
        block[start : start + table.nbytes].view(table.dtype).view(table.shape)
        for start, table in zip(_offsets(like), like, strict=False)
    ]


def _offsets(tables: Sequence[Tensor]) -> list[int]:
    """Bytes before each table, and in all."""
    offsets = [0]
    for table in tables:
        offsets.append(offsets[-1] + -(-table.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets
