"""Small copies between a device and pinned memory of the host.

The caller must keep the host's memory until the copy is done, because torch's allocator does not know about the copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operations import Operation


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
