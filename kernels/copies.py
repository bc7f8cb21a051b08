"""Small copies between a device and pinned memory of the host.

The caller must keep the host's memory until the copy is done, because torch's allocator does not know about the copy.
"""

from __future__ import annotations

from torch import Tensor

from .operations import Operation


def copy_numbers_ref_(target: Tensor, source: Tensor) -> Tensor:
    """Copy `source` to `target`, both contiguous and of one shape and dtype, without waiting; return `target`.

    The one on the host is pinned."""
    return target.copy_(source, non_blocking=True)


def copy_columns_ref_(target: Tensor, source: Tensor, num_columns: int) -> Tensor:
    """Copy the first `num_columns` columns of `source` to `target`, both [num_rows, width] and contiguous, without
    waiting; return `target`. The one on the host is pinned."""
    target[:, :num_columns].copy_(source[:, :num_columns], non_blocking=True)
    return target


def _on_device(target: Tensor, source: Tensor, *_: int, **__: int) -> Tensor:
    return target if target.is_cuda else source


copy_numbers_ = Operation("copy_numbers_", copy_numbers_ref_, by=_on_device)
copy_columns_ = Operation("copy_columns_", copy_columns_ref_, by=_on_device)
