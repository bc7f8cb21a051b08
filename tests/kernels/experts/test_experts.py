"""The specification of products of experts against one expert after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.kernels.experts.experts import (
    ExpertWeight,
    block_size,
    experts_linear_ref,
    gated_experts_linear_ref,
    mix_parts_ref,
    most_blocks,
    place_experts_ref,
)
from baton.kernels.experts.mxfp4 import unpacked
from baton.kernels.formats import SwigluClamp
from baton.kernels.products.fp8 import E4M3, dequantized
from baton.kernels.products.silu import clamped_silu_mul, silu_mul_ref

NUM_EXPERTS = 7


def choose(num_rows: int, num_active: int, seed: int = 0) -> torch.Tensor:
    """Return different experts for each row; experts 0 and 4 are chosen by none."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([1, 2, 3, 5, 6])
    picks = [allowed[torch.randperm(5, generator=generator)[:num_active]] for _ in range(num_rows)]
    return torch.stack(picks) if picks else torch.empty(0, num_active, dtype=torch.int64)


@pytest.mark.parametrize(("num_rows", "num_active"), [(0, 2), (1, 1), (1, 5), (30, 3), (400, 2)])
def test_every_pair_has_one_place_in_a_block_of_its_expert(num_rows: int, num_active: int) -> None:
    chosen = choose(num_rows, num_active)
    places = place_experts_ref(chosen, NUM_EXPERTS)
    block, flat = block_size(chosen.numel(), NUM_EXPERTS), chosen.flatten()
    assert len(places.experts) == most_blocks(len(flat), NUM_EXPERTS, block)
    assert sorted(places.pairs[places.pairs >= 0].tolist()) == list(range(len(flat)))
    seen: dict[int, list[int]] = {}
    for expert, pairs in zip(places.experts.tolist(), places.pairs.split(block) if num_rows else (), strict=True):
        own = pairs[pairs >= 0].tolist()
        assert (expert < NUM_EXPERTS) == bool(own)
        assert all(flat[pair] == expert for pair in own)
        seen.setdefault(expert, []).extend(own)
    assert all(own == sorted(own) for own in seen.values())


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_block_is_as_large_as_the_mean_number_of_pairs_asks_for(is_packed: bool) -> None:
    sizes = [block_size(32 * mean, 32, is_packed=is_packed) for mean in (1, 8, 12, 24, 32, 64, 65)]
    assert sizes == ([16, 16, 16, 32, 64, 64, 128] if is_packed else [16, 16, 32, 32, 32, 64, 128])


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("has_row_of_each_pair", [False, True])
def test_products_are_those_of_each_expert(is_quantized: bool, has_row_of_each_pair: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    chosen, weights = choose(9, 2), torch.randn(NUM_EXPERTS, 12, 40, generator=generator)
    weight = ExpertWeight(weights.flatten(0, 1), None, 40)
    x = torch.randn(18 if has_row_of_each_pair else 9, 40, generator=generator)
    if is_quantized:
        scales = torch.rand(NUM_EXPERTS * 12, 1, generator=generator) + 0.5
        weight = ExpertWeight(weight.values.to(E4M3), scales, 40)
        weights = dequantized(weight.values, scales, 40).unflatten(0, (NUM_EXPERTS, 12))
    places = place_experts_ref(chosen, NUM_EXPERTS)
    expected = torch.stack(
        [
            F.linear(x[pair if has_row_of_each_pair else pair // 2], weights[expert])
            for pair, expert in enumerate(chosen.flatten())
        ]
    )
    ours = experts_linear_ref(x, None, weight, places, torch.float32)
    bound = 40 * 2.0**-24 * float((x.abs() @ weights.abs().flatten(0, 1).T).max())  # a rounding per number of a sum
    torch.testing.assert_close(ours, expected, atol=bound, rtol=0)
    gated = gated_experts_linear_ref(x, None, weight, places, torch.float32)
    torch.testing.assert_close(gated, silu_mul_ref(ours))  # the product may be large, and so are its roundings


@pytest.mark.parametrize("is_packed", [False, True])
def test_products_with_biases_and_a_clamped_gate(is_packed: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    chosen, biases = choose(9, 2), torch.randn(NUM_EXPERTS, 12, generator=generator)
    weights, clamp = torch.randn(NUM_EXPERTS, 12, 64, generator=generator), SwigluClamp(1.0, 1.3)
    weight = ExpertWeight(weights.flatten(0, 1), None, 64, biases.flatten())
    if is_packed:
        values = torch.randint(256, (NUM_EXPERTS * 12, 32), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 127, (NUM_EXPERTS * 12, 2), dtype=torch.uint8, generator=generator)
        weight = ExpertWeight(values, scales, 32, biases.flatten())
        weights = unpacked(values, scales, 32).unflatten(0, (NUM_EXPERTS, 12))
    x, places = torch.randn(9, 64, generator=generator), place_experts_ref(chosen, NUM_EXPERTS)
    pairs = enumerate(chosen.flatten())
    expected = torch.stack([F.linear(x[pair // 2], weights[expert], biases[expert]) for pair, expert in pairs])
    torch.testing.assert_close(experts_linear_ref(x, None, weight, places, torch.float32), expected)
    gated = gated_experts_linear_ref(x, None, weight, places, torch.float32, clamp)
    torch.testing.assert_close(gated, clamped_silu_mul(expected, clamp))


def test_parts_are_mixed_by_their_shares() -> None:
    parts, shares = torch.randn(6, 4), torch.rand(3, 2)
    expected = torch.stack([parts[2 * row] * shares[row, 0] + parts[2 * row + 1] * shares[row, 1] for row in range(3)])
    torch.testing.assert_close(mix_parts_ref(parts, shares), expected)
    assert mix_parts_ref(parts.half(), shares).dtype is torch.float16
    others = torch.randn(2, 3, 4)
    torch.testing.assert_close(mix_parts_ref(parts, shares, others[0]), expected + others[0])
    torch.testing.assert_close(mix_parts_ref(parts, shares, others), expected + others.sum(0))
