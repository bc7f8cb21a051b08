"""The operations of kernels/copies.py on a GPU: kernels that read or write pinned memory of the host over the bus.

A copy engine takes about five microseconds to begin and as many to end, and the device stands still meanwhile. A kernel
of a few numbers does not, and it can leave out what nobody reads.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # a constant: a kernel that compiles when tables grow would hold up a round


def copy_numbers_(target: Tensor, source: Tensor) -> Tensor:
    """Copy as `copy_numbers_ref_` does."""
    assert target.shape == source.shape and target.dtype == source.dtype, (target.shape, source.shape)
    assert target.is_contiguous() and source.is_contiguous(), (target.stride(), source.stride())
    if source.numel():
        _copy_kernel[(triton.cdiv(source.numel(), _BLOCK),)](target, source, source.numel(), BLOCK=_BLOCK)
    return target


def copy_columns_(target: Tensor, source: Tensor, num_columns: int) -> Tensor:
    """Copy as `copy_columns_ref_` does."""
    num_rows, width = target.shape
    assert target.shape == source.shape and target.dtype == source.dtype, (target.shape, source.shape)
    assert target.is_contiguous() and source.is_contiguous() and 0 < num_columns <= width, (num_columns, width)
    _columns_kernel[(num_rows, triton.cdiv(num_columns, _BLOCK))](target, source, width, num_columns, BLOCK=_BLOCK)
    return target


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
