"""Whether the Triton kernels serve a tensor: on CUDA, unless BATON_TRITON=0 asks for torch's own operations.

Triton is imported where it is used first: a node on a CPU does without.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

logger = logging.getLogger(__name__)

_MAX_DEPENDENT_ROWS = 1


def compiled(tensor: torch.Tensor) -> bool:
    """Whether the kernels of kernels/triton_*.py serve tensors of this device."""
    return tensor.is_cuda and _has_triton()


def dependent_launch(num_rows: int) -> bool:
    """Whether kernels of so many rows are launched while the one before still runs (programmatic dependent launch):
    each fetches what no kernel writes, its weights, then waits for the end of all kernels before it. It pays where a
    step is many short kernels, and costs more than it brings where many rows make them long (docs/performance.md)."""
    return num_rows <= _MAX_DEPENDENT_ROWS and _has_dependent_launch()


@functools.cache
def _has_dependent_launch() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def _has_triton() -> bool:
    if os.environ.get("BATON_TRITON") == "0":
        return False
    try:
        import triton
    except ImportError as error:
        logger.warning("triton cannot be used (%s); kernels are torch's, and slower", error)
        return False
    logger.info("kernels by triton %s", triton.__version__)
    return True
