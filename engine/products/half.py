"""Float32 products on a CPU with a weight of half precision, packed by FBGEMM.

A decode step on a CPU mostly waits for weights from memory, so a smaller weight is a faster one. The weight must have
come from 16 bits, and float16 must hold it. Products and sums stay float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ...kernels.products.norm import Norm
from .base import Product, WeightSource

# Rounding of weights to half precision that disappears in the rounding of a float32 sum of a few hundred products.
_TOLERANCE = 2.0**-22


@dataclass(frozen=True, slots=True, eq=False)
class HalfProduct(Product):
    """Holds weight and bias in FBGEMM's own form."""

    multiply: Callable[[Tensor, Any], Tensor]
    packed: Any  # a torch.ScriptObject
    in_size: int
    out_size: int

    @classmethod
    def build(cls, source: WeightSource) -> Self | None:
        if not (source.is_float32_on_cpu and _is_available()):
            return None
        weight = source.fused("weight")
        if not fits_half(weight):
            return None
        with torch.inference_mode(False):
            packed = torch.ops.quantized.linear_prepack_fp16(weight, source.bias)
        return cls(_product(), packed, weight.shape[1], weight.shape[0])

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        assert norm is None and residual is None, "nothing is fused here"
        return self.multiply(x, self.packed)

    def parts(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.packed)  # the same as a call, which costs more: half of all products come here


def fits_half(weight: Tensor) -> bool:
    """Return whether float16 holds a float32 weight as well as float32 arithmetic can tell: exactly, except that tiny
    values are rounded to multiples of 2^-24. This is so for weights that were trained in bfloat16 or float16."""
    error = torch.linalg.vector_norm(weight.half().float().sub_(weight))
    return bool(error <= _TOLERANCE * torch.linalg.vector_norm(weight))  # an overflow makes error infinite or NaN


def _product() -> Callable[[Tensor, Any], Tensor]:
    """Return FBGEMM's product without torch's search for fake arguments, which takes a good part of a small product."""
    overload = torch.ops.quantized.linear_dynamic_fp16.default
    return getattr(overload, "_op", overload)


def _is_available() -> bool:
    return torch.backends.quantized.engine in ("fbgemm", "x86")
