"""Cosines and sines of positions."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, ULP

pytest.importorskip("triton")

from baton.kernels.products import triton_rotary
from baton.kernels.products.rotary import turns_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_tokens", "head_dim", "scale"), [(1, 64, 1.0), (11, 80, 1.25), (3, 8, 1.0)])
def test_turns(num_tokens: int, head_dim: int, scale: float, dtype: torch.dtype) -> None:
    positions = torch.randint(0, 131_072, (num_tokens,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    half = 10_000.0 ** -torch.linspace(0, 1, head_dim // 2)
    frequencies = torch.stack((torch.cat((half, half)), torch.cat((-half, half)))).to(DEVICE)
    spread = torch.stack((positions, positions - 1), dim=1)[:, 0]
    expected = turns_ref(positions, frequencies, scale, dtype)
    for actual, turned in zip(triton_rotary.turns(spread, frequencies, scale, dtype), expected, strict=True):
        assert actual.shape == (num_tokens, 1, head_dim) and actual.dtype == dtype and actual.is_contiguous()
        torch.testing.assert_close(actual, turned, rtol=2 * ULP[dtype], atol=1e-6)
