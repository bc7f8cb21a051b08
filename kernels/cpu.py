"""The CPU's part of the table (operations.py) for callers that ask before they build a plan."""

from __future__ import annotations

import torch

from . import operations
from .paged_rows import PagedRows, attend, attend_stored

__all__ = ["PagedRows", "attend", "attend_stored", "compiled"]


def compiled(tensor: torch.Tensor) -> bool:
    """Return `operations.reads_pages` of a tensor's device and dtype. New code asks that, or calls an operation."""
    return operations.reads_pages(tensor.device, tensor.dtype)
