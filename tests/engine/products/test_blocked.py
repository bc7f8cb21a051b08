"""Blocked weights on a CPU: they serve what half precision cannot hold, with the numbers of the plain product."""

from __future__ import annotations

import pytest
import torch

from baton.engine.products.blocked import BlockedProduct
from baton.engine.products.linear import Linear


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_blocked_equals_plain(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(48, 40, generator=generator)
    bias = torch.randn(48, generator=generator) if has_bias else None
    blocked, plain = Linear.of(weight.clone(), bias), Linear.dense(weight, bias)
    assert isinstance(blocked.product, BlockedProduct)
    assert (blocked.out_size, blocked.in_size) == (48, 40)
    x = torch.randn(num_rows, 40, generator=generator)
    torch.testing.assert_close(blocked(x), plain(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(blocked.gated(x), plain.gated(x), atol=1e-6, rtol=0)
