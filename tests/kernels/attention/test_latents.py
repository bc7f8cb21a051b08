"""The heads of attention to latents against sums that are written out."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.attention.latents import LatentWeights, join_latents, latent_values_ref
from baton.kernels.products.norm import Norm


def weights_of(generator: torch.Generator, *, is_interleaved: bool) -> LatentWeights:
    """Three heads of 5 plain numbers and 4 values over latents of 10 numbers."""
    norm, up = torch.randn(10, generator=generator), torch.randn(3, 9, 10, generator=generator)
    return LatentWeights(Norm(norm, 1e-3), up, 5, is_interleaved)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_have_their_numbers_in_the_order_of_the_pool(is_interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = weights_of(generator, is_interleaved=is_interleaved)
    q, stored = torch.randn(4, 3, 11, generator=generator), torch.randn(4, 16, generator=generator)
    heads = join_latents(q, stored, weights)
    order = [0, 2, 4, 1, 3, 5] if is_interleaved else range(6)
    for token in range(4):
        for head in range(3):
            absorbed = sum(q[token, head, i] * weights.up[head, i] for i in range(5))
            torch.testing.assert_close(heads[token, head, :10], absorbed)
            assert heads[token, head, 10:].tolist() == [q[token, head, 5 + i].item() for i in order]
        latent, turned = stored[token, :10], stored[token, 10:]
        normed = latent / (latent.square().mean() + 1e-3).sqrt() * weights.norm.weight
        torch.testing.assert_close(heads[token, 3, :10], normed)
        assert heads[token, 3, 10:].tolist() == [turned[i].item() for i in order]


def test_values_are_products_of_attended_latents() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, attended = weights_of(generator, is_interleaved=True), torch.randn(4, 3, 10, generator=generator)
    values = latent_values_ref(attended, weights).view(4, 3, 4)
    for token in range(4):
        for head in range(3):
            expected = [(weights.up[head, 5 + i] * attended[token, head]).sum() for i in range(4)]
            torch.testing.assert_close(values[token, head], torch.stack(expected))
