"""Blocked weights on a CPU: they serve what half precision cannot hold, with the numbers of the plain product."""

from __future__ import annotations

import pytest
import torch
from products import check_equals_plain

from baton.engine.products.blocked import BlockedProduct
from baton.engine.products.dense import DenseProduct
from baton.engine.products.linear import Linear


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_blocked_equals_plain(num_rows: int, has_bias: bool) -> None:
    weight = 0.002 * torch.randn(520, 512, generator=torch.Generator().manual_seed(0))
    check_equals_plain(BlockedProduct, weight, num_rows, has_bias=has_bias)


def test_a_small_weight_stays_plain() -> None:
    assert isinstance(Linear.of(0.02 * torch.randn(520, 500), None).product, DenseProduct)
