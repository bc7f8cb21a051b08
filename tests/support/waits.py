"""Whether the host waits for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """A call that waits for the device is an error, as far as torch notices."""
    with warnings.catch_warnings(action="ignore"):  # "prototype feature", once a process
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
