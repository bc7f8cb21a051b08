"""Capture of a function in a CUDA graph."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def captured(run: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what `run` submits to the current device, and the static tensors that every replay writes.

    `run` runs twice, and reads nothing of a tensor on the host. `pool` (`torch.cuda.graph_pool_handle`) is the memory
    of graphs of which one runs at a time.
    """
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            run()  # compiles kernels and allocates what outlives a run
    finally:  # also without memory: kernels that were submitted still use their inputs
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.graph(graph, pool=pool):
        return graph, run()


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all first runs on a device. cuBLAS keeps working memory for each stream that it was used on,
    so a stream per capture would take much more."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python collects no cycles meanwhile: to free another graph, an event or a stream breaks a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
