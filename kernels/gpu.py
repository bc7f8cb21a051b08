"""Facts about the GPU that launches depend on. The table (operations.py) says which backend serves an operation."""

from __future__ import annotations

import functools
import os

import torch

# Kernels of more rows take longer than their launch. Without a graph, such a launch also costs the host more.
_MAX_DEPENDENT_ROWS = 512


def dependent_launch(num_rows: int) -> bool:
    """Return whether a kernel of so many rows starts while the kernel before it still runs (programmatic dependent
    launch, compute capability 9.0). BATON_DEPENDENT_LAUNCH=0 switches this off, for comparing.

    Such a kernel first loads what no kernel of a layer writes: weights and the plan of a forward. Then it waits for the
    end of the kernel before it. A plan is written by kernels that are launched plainly.

    A kernel may let the next one start at any point: usually at once, at its end if the next kernel's programs would be
    spread unevenly beside its own. The next one starts when all programs have come to that point or have ended. The
    point changes the speed and nothing else."""
    return num_rows <= _MAX_DEPENDENT_ROWS and _has_dependent_launch()


@functools.cache
def _has_dependent_launch() -> bool:
    if os.environ.get("BATON_DEPENDENT_LAUNCH") == "0" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)
