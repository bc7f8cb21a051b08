"""The device for tests of Triton kernels: the GPU if there is one, otherwise the CPU in Triton's interpreter.

Import this module before anything imports triton, which decides at import. tests/conftest.py does so.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
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


def reduce_by_halves() -> None:
    """Let Triton's interpreter reduce by functions of our own as a GPU does: half of the elements with the other half,
    again and again. It takes one element after the other, which takes most of the time of some tests."""
    import triton.language as tl
    from triton.runtime.interpreter import ReduceOps

    def generic_reduce(self: Any, values: tuple[tl.tensor, ...]) -> list[tl.tensor]:
        axis, rank = self.axis, len(values[0].shape)
        parts = [value.handle.data for value in values]
        parts = [part.reshape(-1) if axis is None else np.moveaxis(part, axis, 0) for part in parts]
        dtypes = [value.dtype for value in values]
        while len(parts[0]) > 1:
            half = len(parts[0]) // 2
            pairs = [each for side in (slice(half), slice(half, None)) for each in (part[side] for part in parts)]
            both = [self.to_tensor(part, dtype) for part, dtype in zip(pairs, dtypes * 2, strict=True)]
            found = self.combine_fn.fn(*both)
            parts = [each.handle.data for each in (found if isinstance(found, tuple) else (found,))]
        results = [part[0] for part in parts]
        if self.keep_dims:
            places = tuple(range(rank)) if axis is None else axis
            results = [np.expand_dims(result, places) for result in results]
        return [self.to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]

    ReduceOps.generic_reduce = generic_reduce
