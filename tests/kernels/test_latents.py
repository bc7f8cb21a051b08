"""The heads of attention to latents against sums that are written out."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.latents import join_latents_ref
from baton.kernels.norm import Norm


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_have_their_numbers_in_the_order_of_the_pool(is_interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    absorbed, rotary = torch.randn(4, 3, 10, generator=generator), torch.randn(4, 3, 6, generator=generator)
    stored, weight = torch.randn(4, 16, generator=generator), torch.randn(10, generator=generator)
    heads = join_latents_ref(absorbed, rotary, stored, Norm(weight, 1e-3), is_interleaved=is_interleaved)
    order = [0, 2, 4, 1, 3, 5] if is_interleaved else range(6)
    for token in range(4):
        for head in range(3):
            expected = [*absorbed[token, head].tolist(), *(rotary[token, head, i].item() for i in order)]
            assert heads[token, head].tolist() == expected
        latent, turned = stored[token, :10], stored[token, 10:]
        normed = latent / (latent.square().mean() + 1e-3).sqrt() * weight
        torch.testing.assert_close(heads[token, 3, :10], normed)
        assert heads[token, 3, 10:].tolist() == [turned[i].item() for i in order]
