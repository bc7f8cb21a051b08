"""A check that the host does not wait for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error for every call in the block that waits for the device, as far as torch notices."""
    with warnings.catch_warnings(action="ignore"):  # "prototype feature", once a process
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
