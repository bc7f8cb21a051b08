"""Small copies between a device and pinned memory of the host, by kernels that read or write it over the bus.

A copy engine takes some five microseconds to begin and as many to end while the device stands still; a kernel of a
few numbers does not, and can leave out what nobody reads. Who asks must keep the host's memory until the copy is done:
torch's allocator does not know of it.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # a constant: a kernel that compiles when tables grow would hold up a round


def copy_numbers_(target: Tensor, source: Tensor) -> Tensor:
    """target = source, both contiguous, of one shape and dtype, one of them pinned."""
    assert target.shape == source.shape and target.dtype == source.dtype, (target.shape, source.shape)
    assert target.is_contiguous() and source.is_contiguous(), (target.stride(), source.stride())
    if source.numel():
        _copy_kernel[(triton.cdiv(source.numel(), _BLOCK),)](target, source, source.numel(), BLOCK=_BLOCK)
    return target


def copy_columns_(target: Tensor, source: Tensor, num_columns: int) -> Tensor:
    """target[:, :num_columns] = source[:, :num_columns], both [num_rows, width], contiguous, one of them pinned."""
    num_rows, width = target.shape
    assert target.shape == source.shape and target.dtype == source.dtype, (target.shape, source.shape)
    assert target.is_contiguous() and source.is_contiguous() and 0 < num_columns <= width, (num_columns, width)
    _columns_kernel[(num_rows, triton.cdiv(num_columns, _BLOCK))](target, source, width, num_columns, BLOCK=_BLOCK)
    return target


@triton.jit(do_not_specialize=("num_numbers",))
def _copy_kernel(target_ptr, source_ptr, num_numbers, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < num_numbers), mask=at < num_numbers)


@triton.jit(do_not_specialize=("width", "num_columns"))
def _columns_kernel(target_ptr, source_ptr, width, num_columns, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * width + column
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=column < num_columns), mask=column < num_columns)
