"""`advance_` of advance.py on a GPU: one launch, one program per sequence."""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .advance import Columns


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
