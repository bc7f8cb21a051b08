"""Products of plain weights: torch's, and on CUDA the Triton kernels for few rows
(kernels/products/triton_linear.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ...kernels.experts.experts import ExpertWeight
from ...kernels.products.linear import fuses, gated_linear, linear, linear_parts
from ...kernels.products.norm import Norm
from ...kernels.products.silu import silu_mul
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
        return linear(x, self.weight, self.bias, norm=norm, residual=residual)

    def parts(self, x: Tensor) -> Tensor:
        return linear_parts(x, self.weight) if self.bias is None else self(x)

    def gated(self, x: Tensor, *, norm: Norm | None = None) -> Tensor:
        return gated_linear(x, self.weight, norm=norm) if self.bias is None else silu_mul(self(x, norm=norm))

    def fuses(self, x: Tensor, *, is_gated: bool = False) -> bool:
        return not (is_gated and self.bias is not None) and fuses(x, self.weight, is_gated=is_gated)


def read_experts(source: WeightSource) -> tuple[ExpertWeight, None]:
    """Return the weights of all experts as kernels take them. No rows are rounded."""
    return ExpertWeight(source.fused("weight"), None, source.in_size, source.bias), None
