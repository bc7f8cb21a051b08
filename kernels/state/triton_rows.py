"""The operations of rows.py on a GPU: one launch per four tensors, one program per row and block of columns."""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import empty_block, unpacked

_AT_ONCE = 4  # pairs of tensors of one launch
_BLOCK = 1024  # elements of a row


def gather_rows(tables: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """Return `gather_rows_ref`: new tensors [n, ...], for `index` [n] int64 of any stride."""
    rows = [table.new_empty((len(index), *table.shape[1:])) for table in tables]
    copy_rows_(rows, tables, of=index)
    return rows


def assign_rows_(tables: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Write rows as `assign_rows_ref_` does; `tables` are contiguous."""
    copy_rows_(tables, rows, to=index)


def packed(tables: Sequence[Tensor]) -> Tensor:
    """Return `packed_ref`, [num_bytes] uint8. `tables` have the same number of rows."""
    block = empty_block(tables)
    copy_rows_(unpacked(block, tables), tables)
    return block


def copy_rows_(
    new: Sequence[Tensor], old: Sequence[Tensor], *, to: Tensor | None = None, of: Tensor | None = None
) -> None:
    """Copy the rows `of` [n] int64 of each of `old` to the rows `to` [n] int64 of its partner in `new`.

    None stands for 0, 1, 2 and so on. Partners have the same width and dtype. `new` is contiguous."""
    index = of if to is None else to
    num_rows = len(old[0]) if index is None else len(index)
    pairs = [(_numbers(target), _numbers(source.contiguous())) for target, source in zip(new, old, strict=True)]
    if num_rows == 0:
        return
    for target, source in pairs:
        assert target.shape[1] == source.shape[1] and target.dtype == source.dtype, (target.shape, source.shape)
    for start in range(0, len(pairs), _AT_ONCE):
        some = pairs[start : start + _AT_ONCE]
        widths = [target.shape[1] for target, _ in some] + [0] * (_AT_ONCE - len(some))
        some += some[:1] * (_AT_ONCE - len(some))
        _copy_rows_kernel[(num_rows, triton.cdiv(max(widths), _BLOCK))](
            *(target for target, _ in some), *(source for _, source in some), *widths,
            some[0][0] if index is None else index, 0 if index is None else index.stride(0),
            HAS_TO=to is not None, HAS_OF=of is not None, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def _numbers(rows: Tensor) -> Tensor:
    """Return a view [num_rows, elements of a row], of a dtype that kernels copy as it is."""
    assert rows.is_contiguous(), rows.stride()
    rows = rows.view(torch.uint8) if rows.dtype is torch.bool else rows
    return rows.view(len(rows), rows[0].numel() if len(rows) else 0)


@triton.jit
def _copy_row(new_ptr, old_ptr, to, of, column, width):
    """Copy columns `column` [BLOCK] of row `of` of `old_ptr` to row `to` of `new_ptr`, both [.., width]."""
    is_in = column < width
    tl.store(new_ptr + to * width + column, tl.load(old_ptr + of * width + column, mask=is_in), mask=is_in)


@triton.jit(do_not_specialize=("index_stride",))
def _copy_rows_kernel(
    new_0, new_1, new_2, new_3,  # [.., width_i] of any dtype each, written
    old_0, old_1, old_2, old_3,  # [.., width_i] of new_i's dtype each
    width_0, width_1, width_2, width_3,  # 0: this pair is not copied
    index_ptr,  # [num_rows] int64, index_stride apart, read if HAS_TO or HAS_OF
    index_stride, HAS_TO: tl.constexpr, HAS_OF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows, ceil(largest width / BLOCK)). HAS_TO: the index names rows of `new`; HAS_OF: rows of `old`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to, of = row, row
    if HAS_TO:
        to = tl.load(index_ptr + row * index_stride)
    if HAS_OF:
        of = tl.load(index_ptr + row * index_stride)
    _copy_row(new_0, old_0, to, of, column, width_0)
    _copy_row(new_1, old_1, to, of, column, width_1)
    _copy_row(new_2, old_2, to, of, column, width_2)
    _copy_row(new_3, old_3, to, of, column, width_3)
