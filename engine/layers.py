"""The linear layer, and the forms in which the CPU multiplies by its weights fastest.

A decode step on a CPU mostly waits for weights from memory, so a smaller form is a faster one. Measured on one core
with the demo model's 29 MB of float32 weights, all products of a step: plain 1.5 ms (1 row) and 2.8 ms (8 rows),
oneDNN's blocked form 1.0 and 1.4, half precision 0.5 and 0.7. Whichever form is chosen replaces the plain weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels import gpu
from ..kernels.silu import silu_mul

_BLOCKED_FOR_ROWS = 32  # the number of rows that oneDNN chooses its blocking for
# Rounding of weights to half precision that disappears in the rounding of a float32 sum of a few hundred products.
_HALF_TOLERANCE = 2.0**-22


@dataclass(slots=True, eq=False)
class Linear:
    """y = x @ weight.T + bias. At most one of `half` and `blocked` is there."""

    weight: torch.Tensor | None  # [out_size, in_size]; None once packed
    bias: torch.Tensor | None  # [out_size]
    half: Any = None  # FBGEMM's packed float16 weight and bias, opaque
    blocked: torch.Tensor | None = None  # oneDNN's blocked float32 weight, opaque

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, in_size] -> [num_rows, out_size], both of the model's dtype."""
        if self.half is not None:
            return _half_product()(x, self.half)
        if self.blocked is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        assert self.weight is not None
        if gpu.compiled(x):
            from ..kernels.triton_linear import linear

            return linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """`silu_mul` of the product, of which the gate is the first half: [num_rows, in_size] -> [num_rows, out_size /
        2]; in one kernel where there is one."""
        if gpu.compiled(x) and self.weight is not None and self.bias is None:
            from ..kernels.triton_linear import gated_linear

            return gated_linear(x, self.weight)
        return silu_mul(self(x))

    def pack(self) -> None:
        """Replace a float32 weight on the CPU by a faster form: half precision where the weight came from 16 bits and
        fits (products and sums stay float32), else blocked. Other weights, and torch without these, stay plain."""
        if self.weight is None or self.weight.device.type != "cpu" or self.weight.dtype != torch.float32:
            return
        with torch.inference_mode(False):
            if _has_half_products() and fits_half(self.weight):
                self.half = torch.ops.quantized.linear_prepack_fp16(self.weight, self.bias)
                self.weight = None
            elif _has_blocked_products():
                self.blocked = torch.ops.mkldnn._reorder_linear_weight(self.weight, _BLOCKED_FOR_ROWS)
                self.weight = None


def fits_half(weight: torch.Tensor) -> bool:
    """Whether float16 holds a float32 weight as well as float32 arithmetic can tell: exactly, but for tiny values that
    are rounded to multiples of 2^-24. So it is with weights trained in bfloat16 or float16."""
    error = torch.linalg.vector_norm(weight.half().float().sub_(weight))
    return bool(error <= _HALF_TOLERANCE * torch.linalg.vector_norm(weight))  # an overflow makes error infinite or NaN


@functools.cache
def _half_product() -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """FBGEMM's product without torch's look for fake arguments, which costs a tenth of a small product."""
    overload = torch.ops.quantized.linear_dynamic_fp16.default
    return getattr(overload, "_op", overload)


def _has_half_products() -> bool:
    return torch.backends.quantized.engine in ("fbgemm", "x86")


def _has_blocked_products() -> bool:
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
