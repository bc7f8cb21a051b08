"""rms_norm against its specification."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.products.norm import rms_norm, rms_norm_ref


@pytest.mark.parametrize("shape", [(1, 256), (5, 3, 64), (0, 8)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(shape, generator=generator)).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    before = x.clone()
    # The sum of n squares has n roundings at most, of which the root halves the effect; then one step of the dtype.
    rtol = (shape[-1] / 2 + 8) * 2.0**-24 + (torch.finfo(dtype).eps if dtype is torch.bfloat16 else 0)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6), atol=0, rtol=rtol)
    assert torch.equal(x, before)


def test_a_view_of_heads() -> None:
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(16)
    torch.testing.assert_close(rms_norm(x[:, :2], weight, 1e-6), rms_norm_ref(x[:, :2].contiguous(), weight, 1e-6))
