"""A product that fuses nothing: its gate and its parts follow from its call, and a norm or residual is refused."""

from __future__ import annotations

from typing import Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.checkpoint.quantization import ONLINE_FP8
from baton.engine.products.base import Product, WeightSource
from baton.kernels.products.norm import Norm
from baton.kernels.products.silu import silu_mul_ref


class Plain(Product):
    """The smallest product: torch's, and nothing else."""

    def __init__(self, weight: Tensor) -> None:
        self.out_size, self.in_size = weight.shape
        self._weight = weight

    @classmethod
    def build(cls, source: WeightSource) -> Self:
        return cls(source.fused("weight"))

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        assert norm is None and residual is None, "nothing is fused here"
        return F.linear(x, self._weight)


def test_parts_and_gate_follow_from_the_call() -> None:
    generator = torch.Generator().manual_seed(0)
    product, x = Plain(torch.randn(12, 8, generator=generator)), torch.randn(3, 8, generator=generator)
    assert torch.equal(product.parts(x), product(x)) and product.parts(x).shape == (3, product.out_size)
    torch.testing.assert_close(product.gated(x), silu_mul_ref(product(x)))
    assert not product.fuses(x) and not product.fuses(x, is_gated=True)


def test_a_norm_is_refused() -> None:
    product, x = Plain(torch.ones(4, 4)), torch.ones(1, 4)
    with pytest.raises(AssertionError, match="nothing is fused"):
        product.gated(x, norm=Norm(torch.ones(4), 1e-5))


def test_a_plain_weight_is_read_unless_a_format_says_otherwise() -> None:
    [(name, stored)] = Plain.tensors(12, 8, ONLINE_FP8).items()
    assert (name, stored.shape, set(stored.dtypes)) == ("weight", (12, 8), {"F32", "BF16", "F16"})
