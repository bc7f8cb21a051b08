"""Products of plain weights: torch's, and on CUDA the Triton kernels for few rows (kernels/triton_linear.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from ...kernels import gpu
from ...kernels.norm import Norm
from ...kernels.silu import silu_mul
from .base import Product, WeightSource


@dataclass(frozen=True, slots=True, eq=False)
class DenseProduct(Product):
    """The weight in the dtype of x, 16 or 32 bits."""

    weight: Tensor  # [out_size, in_size]
    bias: Tensor | None  # [out_size]
    in_size: int
    out_size: int

    @classmethod
    def build(cls, source: WeightSource) -> Self:
        return cls.of(source.fused("weight"), source.bias)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Return the product by `weight` [out_size, in_size] and `bias` [out_size], which it keeps."""
        return cls(weight, bias, weight.shape[1], weight.shape[0])

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        if gpu.compiled(x):
            from ...kernels.triton_linear import linear

            return linear(x, self.weight, self.bias, norm=norm, residual=residual)
        assert norm is None and residual is None, "nothing is fused here"
        return F.linear(x, self.weight, self.bias)

    def parts(self, x: Tensor) -> Tensor:
        if self.bias is not None or not gpu.compiled(x):
            return self(x)
        from ...kernels.triton_linear import linear_parts

        return linear_parts(x, self.weight)

    def gated(self, x: Tensor, *, norm: Norm | None = None) -> Tensor:
        if gpu.compiled(x) and self.bias is None:
            from ...kernels.triton_linear import gated_linear

            return gated_linear(x, self.weight, norm=norm)
        assert norm is None, "nothing is fused here"
        return silu_mul(self(x))

    def fuses(self, x: Tensor, *, is_gated: bool = False) -> bool:
        if not gpu.compiled(x) or (is_gated and self.bias is not None):
            return False
        from ...kernels.triton_linear import fuses

        return fuses(x, self.weight, is_gated=is_gated)
