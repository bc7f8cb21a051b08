"""Half-precision weights on a CPU: where they serve, and the numbers of the plain product."""

from __future__ import annotations

import pytest
import torch
from products import check_equals_plain

from baton.engine.products.half import HalfProduct, fits_half
from baton.engine.products.linear import Linear


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_equals_plain(num_rows: int, has_bias: bool) -> None:
    weight = 0.02 * torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    check_equals_plain(HalfProduct, weight.bfloat16().float(), num_rows, has_bias=has_bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_sixteen_bits_are_not_packed(dtype: torch.dtype) -> None:
    assert not isinstance(Linear.of(torch.ones(4, 4, dtype=dtype)).product, HalfProduct)


def test_fits_half() -> None:
    weight = 0.02 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert fits_half(weight.half().float()) and fits_half(weight.bfloat16().float())
    assert not fits_half(weight)
    assert not fits_half(1e-4 * weight.bfloat16().float())  # below float16's normal numbers
    assert not fits_half(torch.full((2, 2), 1e5))
