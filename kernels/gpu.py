"""Whether the Triton kernels serve a tensor: on CUDA, unless BATON_TRITON=0 asks for torch's own operations.

Triton is imported where it is used first: a node on a CPU does without.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

logger = logging.getLogger(__name__)


def compiled(tensor: torch.Tensor) -> bool:
    """Whether the kernels of kernels/triton_*.py serve tensors of this device."""
    return tensor.is_cuda and _has_triton()


@functools.cache
def dependent_launch() -> bool:
    """Whether kernels are launched while the one before still runs (programmatic dependent launch): each fetches what
    no kernel writes, its weights, then waits for the end of all kernels before it. BATON_DEPENDENT_LAUNCH=1 asks for
    it; compute capability 9.0 has it."""
    wants = os.environ.get("BATON_DEPENDENT_LAUNCH") == "1"
    return wants and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


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
