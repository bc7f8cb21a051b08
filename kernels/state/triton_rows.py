"""The operations of rows.py on a GPU: one launch per four tensors, one program per row and block of columns.

A copy engine takes about five microseconds to begin and as many to end, and the device stands still meanwhile. A kernel
of a few numbers does not, and it can leave out what nobody reads. So such copies are kernels that read or write pinned
memory of the host over the bus.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..direct_launch import launch
from .rows import Columns, empty_block, unpacked

_AT_ONCE = 4  # pairs of tensors of one launch
_BLOCK = 1024  # elements of a row
_NUMBERS = 256  # of a copy, a constant: a kernel that compiles when tables grow would hold up a round
_CONSTANTS = {"BLOCK": _NUMBERS}


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


def advance_(
    table: Tensor,
    columns: Columns,
    index: Tensor,
    targets: Tensor,
    is_valid: Tensor,
    num_accepted: Tensor,
    resting: Tensor,
) -> Tensor:
    """Advance sequences as `advance_ref_` does; all tensors but `index` are contiguous. The table's last row is set
    only if a sequence names it."""
    (num_columns, num_rows), (num_seqs, num_targets) = table.shape, targets.shape
    assert index.shape == num_accepted.shape == (num_seqs,) and is_valid.shape == targets.shape, targets.shape
    assert resting.shape == (num_columns,) and table.is_contiguous() and resting.is_contiguous(), resting.shape
    assert num_accepted.is_contiguous() and targets.is_contiguous() and is_valid.is_contiguous(), (
        targets.stride(),
        is_valid.stride(),
    )
    numbers = torch.empty((num_seqs, num_targets + 2), dtype=torch.int64, device=table.device)
    _advance_kernel[(num_seqs,)](
        numbers, table, index, targets, is_valid, num_accepted, resting,
        index.stride(0), num_rows, num_targets, num_columns,
        COUNTS=sum(1 << column for column in columns.counts), LAST_TOKEN=columns.last_token,
        COLUMNS=triton.next_power_of_2(num_columns), TARGETS=triton.next_power_of_2(num_targets), num_warps=1,
    )  # fmt: skip
    return numbers


@triton.jit(do_not_specialize=("index_stride", "num_rows", "num_targets"))
def _advance_kernel(
    numbers_ptr,  # [num_seqs, num_targets + 2] int64, written
    table_ptr,  # [num_columns, num_rows] int64, written
    index_ptr,  # [num_seqs] int64, index_stride apart
    targets_ptr,  # [num_seqs, num_targets] int64
    is_valid_ptr,  # [num_seqs, num_targets] bool
    num_accepted_ptr,  # [num_seqs] int64
    resting_ptr,  # [num_columns] int64
    index_stride,
    num_rows,
    num_targets,
    num_columns,
    COUNTS: tl.constexpr,  # bit c is set if column c counts
    LAST_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    TARGETS: tl.constexpr,
):
    """Grid: (num_seqs,)."""
    seq = tl.program_id(0)
    row, num_accepted = tl.load(index_ptr + seq * index_stride), tl.load(num_accepted_ptr + seq)
    step, column = tl.arange(0, TARGETS), tl.arange(0, COLUMNS)
    is_step = step < num_targets
    targets = tl.load(targets_ptr + seq * num_targets + step, mask=is_step, other=0)
    is_valid = tl.load(is_valid_ptr + seq * num_targets + step, mask=is_step, other=0) != 0
    numbers_ptr += seq * (num_targets + 2)
    tl.store(numbers_ptr, num_accepted)
    tl.store(numbers_ptr + 1, tl.min(tl.where(is_valid, num_targets, step), 0).to(tl.int64))
    tl.store(numbers_ptr + 2 + step, targets, mask=is_step)

    at = table_ptr + column.to(tl.int64) * num_rows + row
    value = tl.load(at, mask=column < num_columns, other=0)
    value += tl.where((COUNTS >> column) & 1 != 0, num_accepted + 1, 0)
    last_token = tl.sum(tl.where(step == num_accepted, targets, 0), 0)
    value = tl.where(column == LAST_TOKEN, last_token, value)
    resting = tl.load(resting_ptr + column, mask=column < num_columns, other=0)
    tl.store(at, tl.where(row == num_rows - 1, resting, value), mask=column < num_columns)


def copy_numbers_(target: Tensor, source: Tensor) -> Tensor:
    """Copy as `copy_numbers_ref_` does."""
    assert target.shape == source.shape and target.dtype == source.dtype, (target.shape, source.shape)
    assert target.is_contiguous() and source.is_contiguous(), (target.stride(), source.stride())
    grid, device = (triton.cdiv(source.numel(), _NUMBERS), 1, 1), target.device if target.is_cuda else source.device
    launch(_copy_kernel, grid, (target, source), (source.numel(),), _CONSTANTS, device)
    return target


def copy_columns_(target: Tensor, source: Tensor, num_columns: int) -> Tensor:
    """Copy as `copy_columns_ref_` does."""
    num_rows, width = target.shape
    assert target.shape == source.shape and target.dtype == source.dtype, (target.shape, source.shape)
    assert target.is_contiguous() and source.is_contiguous() and 0 < num_columns <= width, (num_columns, width)
    grid, device = (num_rows, triton.cdiv(num_columns, _NUMBERS), 1), target.device if target.is_cuda else source.device
    launch(_columns_kernel, grid, (target, source), (width, num_columns), _CONSTANTS, device)
    return target


def load_column_(ints: Tensor, floats: Tensor, doubles: Tensor, numbers: Tensor, row: int) -> None:
    """Write as `load_column_ref_` does, in one launch of one program."""
    num_rows, num_numbers = ints.shape[1], len(numbers)
    assert floats.shape[1] == doubles.shape[1] == num_rows and 0 <= row < num_rows, (floats.shape, doubles.shape, row)
    assert num_numbers == len(ints) + len(floats) + len(doubles) <= _NUMBERS, (num_numbers, len(ints), len(floats))
    assert ints.is_contiguous() and floats.is_contiguous() and doubles.is_contiguous() and numbers.is_contiguous()
    sizes = (len(ints), len(floats), num_numbers, num_rows, row)
    launch(_load_kernel, (1, 1, 1), (ints, floats, doubles, numbers), sizes, _CONSTANTS, ints.device)


@triton.jit(do_not_specialize=("num_numbers",))
def _copy_kernel(
    target_ptr,  # [num_numbers] of any dtype, written
    source_ptr,  # [num_numbers] of the same dtype
    num_numbers,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(num_numbers / BLOCK),)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < num_numbers), mask=at < num_numbers)


@triton.jit(do_not_specialize=("width", "num_columns"))
def _columns_kernel(
    target_ptr,  # [num_rows, width] of any dtype, its first num_columns columns written
    source_ptr,  # [num_rows, width] of the same dtype
    width,
    num_columns,
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows, ceil(num_columns / BLOCK))."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * width + column
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=column < num_columns), mask=column < num_columns)


@triton.jit(do_not_specialize=("num_ints", "num_floats", "num_numbers", "num_rows", "row"))
def _load_kernel(
    ints_ptr,  # [num_ints, num_rows] int64, one column written
    floats_ptr,  # [num_floats, num_rows] float32, likewise
    doubles_ptr,  # [num_numbers - num_ints - num_floats, num_rows] float64, likewise
    numbers_ptr,  # [num_numbers] int64
    num_ints,
    num_floats,
    num_numbers,
    num_rows,
    row,
    BLOCK: tl.constexpr,
):
    """Grid: (1, 1, 1)."""
    at = tl.arange(0, BLOCK)
    numbers = tl.load(numbers_ptr + at, mask=at < num_numbers, other=0)
    reals = numbers.to(tl.float64, bitcast=True)
    place, first_double = at.to(tl.int64) * num_rows + row, num_ints + num_floats
    tl.store(ints_ptr + place, numbers, mask=at < num_ints)
    is_float = (at >= num_ints) & (at < first_double)
    tl.store(floats_ptr + place - num_ints * num_rows, reals.to(tl.float32), mask=is_float)
    is_double = (at >= first_double) & (at < num_numbers)
    tl.store(doubles_ptr + place - first_double * num_rows, reals, mask=is_double)
