"""The operations of copies.py on a GPU: kernels that read or write pinned memory of the host over the bus.

A copy engine takes about five microseconds to begin and as many to end, and the device stands still meanwhile. A kernel
of a few numbers does not, and it can leave out what nobody reads.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..direct_launch import launch

_BLOCK = 256  # a constant: a kernel that compiles when tables grow would hold up a round
_CONSTANTS = {"BLOCK": _BLOCK}


def copy_numbers_(target: Tensor, source: Tensor) -> Tensor:
    """Copy as `copy_numbers_ref_` does."""
    assert target.shape == source.shape and target.dtype == source.dtype, (target.shape, source.shape)
    assert target.is_contiguous() and source.is_contiguous(), (target.stride(), source.stride())
    grid, device = (triton.cdiv(source.numel(), _BLOCK), 1, 1), target.device if target.is_cuda else source.device
    launch(_copy_kernel, grid, (target, source), (source.numel(),), _CONSTANTS, device)
    return target


def copy_columns_(target: Tensor, source: Tensor, num_columns: int) -> Tensor:
    """Copy as `copy_columns_ref_` does."""
    num_rows, width = target.shape
    assert target.shape == source.shape and target.dtype == source.dtype, (target.shape, source.shape)
    assert target.is_contiguous() and source.is_contiguous() and 0 < num_columns <= width, (num_columns, width)
    grid, device = (num_rows, triton.cdiv(num_columns, _BLOCK), 1), target.device if target.is_cuda else source.device
    launch(_columns_kernel, grid, (target, source), (width, num_columns), _CONSTANTS, device)
    return target


def load_column_(ints: Tensor, floats: Tensor, doubles: Tensor, numbers: Tensor, row: int) -> None:
    """Write as `load_column_ref_` does, in one launch of one program."""
    num_rows, num_numbers = ints.shape[1], len(numbers)
    assert floats.shape[1] == doubles.shape[1] == num_rows and 0 <= row < num_rows, (floats.shape, doubles.shape, row)
    assert num_numbers == len(ints) + len(floats) + len(doubles) <= _BLOCK, (num_numbers, len(ints), len(floats))
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
