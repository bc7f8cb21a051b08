"""The linear layer does what its product does."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from baton.engine.products.base import Product, WeightSource
from baton.engine.products.dense import DenseProduct
from baton.engine.products.linear import Linear
from baton.kernels.products.norm import Norm


class Recorder(Product):
    """Answers each method with its own number and keeps what it was given."""

    in_size, out_size = 5, 7

    def __init__(self) -> None:
        self.given: list[object] = []

    @classmethod
    def build(cls, source: WeightSource) -> Self | None:
        return None

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        self.given += [x, norm, residual]
        return torch.tensor(1)

    def parts(self, x: Tensor) -> Tensor:
        self.given.append(x)
        return torch.tensor(2)

    def gated(self, x: Tensor, *, norm: Norm | None = None) -> Tensor:
        self.given += [x, norm]
        return torch.tensor(3)

    def fuses(self, x: Tensor, *, is_gated: bool = False) -> bool:
        self.given += [x, is_gated]
        return True


def test_every_method_reaches_the_product() -> None:
    product, x, norm, residual = Recorder(), torch.ones(1, 5), Norm(torch.ones(5), 1e-5), torch.ones(1, 7)
    linear = Linear(product)
    assert [int(linear(x, norm=norm, residual=residual)), int(linear.parts(x)), int(linear.gated(x, norm=norm))] == [
        1,
        2,
        3,
    ]
    assert linear.fuses(x, is_gated=True)
    expected = [x, norm, residual, x, x, norm, x, True]
    assert all(ours is theirs for ours, theirs in zip(product.given, expected, strict=True))
    assert (linear.in_size, linear.out_size) == (5, 7)


def test_a_dense_layer_keeps_the_weight_itself() -> None:
    weight, bias = torch.ones(3, 2), torch.ones(3)
    product = Linear.dense(weight, bias).product
    assert isinstance(product, DenseProduct) and product.weight is weight and product.bias is bias
