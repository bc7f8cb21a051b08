"""The device for tests of Triton kernels: the GPU if there is one, otherwise the CPU in Triton's interpreter.

Import this module before anything imports triton, which decides at import. tests/conftest.py does so.
"""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = DEVICE == "cpu"  # it truncates where a GPU rounds to bfloat16, and cannot tl.dot of bfloat16
if IS_INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# One unit in the last place, relative: sums in another order may round to the next number.
ULP = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Return normal numbers on DEVICE, equal on every device."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.mul_(scale).to(dtype).to(DEVICE)
