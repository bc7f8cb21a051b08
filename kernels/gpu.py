"""Whether the Triton kernels serve a tensor: on CUDA, unless BATON_TRITON=0 asks for torch's own operations.

Triton is imported where it is used first: a node on a CPU does without.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

logger = logging.getLogger(__name__)

# Beyond, kernels take longer than launching them does, and without a graph such a launch asks more of the host.
_MAX_DEPENDENT_ROWS = 512


def compiled(tensor: torch.Tensor) -> bool:
    """Whether the kernels of kernels/triton_*.py serve tensors of this device."""
    return tensor.is_cuda and _has_triton()


def dependent_launch(num_rows: int) -> bool:
    """Whether kernels of so many rows are launched while the one before still runs (programmatic dependent launch,
    compute capability 9.0). Such a kernel fetches what no kernel of a layer writes, weights and the plan of a forward,
    and then waits for the end of the one before it, as that one did; a plan is written by kernels launched plainly.

    When it lets the next one start is a matter of speed alone: at once where it is short or all its loads are under
    way, at its end where programs of the next would take the place of its own. BATON_DEPENDENT_LAUNCH=0 is for
    comparing."""
    return num_rows <= _MAX_DEPENDENT_ROWS and _has_dependent_launch()


@functools.cache
def _has_dependent_launch() -> bool:
    if os.environ.get("BATON_DEPENDENT_LAUNCH") == "0" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


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
