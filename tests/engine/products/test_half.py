"""Half-precision weights on a CPU: where they serve, and the numbers of the plain product."""

from __future__ import annotations

import pytest
import torch

from baton.engine.products.half import HalfProduct, fits_half
from baton.engine.products.linear import Linear


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_equals_plain(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(48, 40, generator=generator)).bfloat16().float()
    bias = torch.randn(48, generator=generator) if has_bias else None
    packed, plain = Linear.of(weight.clone(), bias), Linear.dense(weight, bias)
    assert isinstance(packed.product, HalfProduct)
    assert (packed.out_size, packed.in_size) == (48, 40)
    x = torch.randn(num_rows, 40, generator=generator)
    torch.testing.assert_close(packed(x), plain(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(packed.gated(x), plain.gated(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_sixteen_bits_are_not_packed(dtype: torch.dtype) -> None:
    assert not isinstance(Linear.of(torch.ones(4, 4, dtype=dtype)).product, HalfProduct)


def test_fits_half() -> None:
    weight = 0.02 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert fits_half(weight.half().float()) and fits_half(weight.bfloat16().float())
    assert not fits_half(weight)
    assert not fits_half(1e-4 * weight.bfloat16().float())  # below float16's normal numbers
    assert not fits_half(torch.full((2, 2), 1e5))
