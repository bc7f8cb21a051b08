"""Blocked weights on a CPU: they serve what half precision cannot hold, with the numbers of the plain product."""

from __future__ import annotations

import pytest
import torch
from products import check_equals_plain

from baton.engine.products.blocked import BlockedProduct


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_blocked_equals_plain(num_rows: int, has_bias: bool) -> None:
    weight = 0.02 * torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    check_equals_plain(BlockedProduct, weight, num_rows, has_bias=has_bias)
