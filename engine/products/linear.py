"""The linear layer: y = x W^T + b by one product, whatever the format of W."""

from __future__ import annotations

from torch import Tensor

from ...kernels.products.norm import Norm
from .base import GivenWeight, Product, Rows
from .dense import DenseProduct
from .registry import choose


class Linear:
    """Owns one product. `normed`, `parts` and others are the product's own methods, so that they cost no second call:
    small steps on a CPU notice it."""

    __slots__ = ("fuses", "gate", "gated", "gates", "normed", "parts", "product", "rounds", "sums_over")

    def __init__(self, product: Product) -> None:
        self.product = product
        self.parts, self.gated, self.fuses = product.parts, product.gated, product.fuses
        self.normed, self.gate, self.gates, self.rounds = product.normed, product.gate, product.gates, product.rounds
        self.sums_over = product.sums_over

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the layer of a weight [out_size, in_size] in the model's dtype, by the format that serves it best."""
        return cls(choose(GivenWeight(weight, bias)))

    @classmethod
    def dense(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the layer that multiplies by `weight` [out_size, in_size] as it is."""
        return cls(DenseProduct.of(weight, bias))

    @property
    def in_size(self) -> int:
        return self.product.in_size

    @property
    def out_size(self) -> int:
        return self.product.out_size

    def __call__(self, x: Rows, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """Return the product, [num_rows, in_size] -> [num_rows, out_size]; `norm` and `residual` only if it `fuses`."""
        return self.product(x, norm=norm, residual=residual)
