"""Experts in the format of their tensors: plain and FP8, by torch and by the operations that graphs can hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.products.base import GivenWeight, WeightSource
from baton.engine.products.experts import ExpertSources, GroupedExperts, TorchExperts, choose_experts_product
from baton.engine.quantization import ONLINE_FP8, Quantization
from baton.kernels.fp8 import E4M3

NUM_EXPERTS, SIZE, INNER = 5, 40, 24


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Stored(WeightSource):
    """FP8 projections with one scale each, and rows with the checkpoint's scale."""

    def __init__(self, weight: Tensor, num_parts: int) -> None:
        self.quantization = Quantization("tensor", "stored")
        self._weights = [part.to(E4M3) for part in weight.chunk(num_parts)]
        self.out_sizes, self.in_size = (len(self._weights[0]),) * num_parts, weight.shape[1]
        self.dtype, self.device = torch.float32, torch.device("cpu")

    bias = None

    def has(self, name: str) -> bool:
        return name in ("weight", "weight_scale", "input_scale")

    def parts(self, name: str) -> list[Tensor]:
        if name == "weight":
            return self._weights
        return [torch.tensor(0.02 if name == "input_scale" else 0.5 + i / 8) for i in range(len(self.out_sizes))]

    def fused(self, name: str) -> Tensor:
        raise AssertionError(name)


def sources(kind: str) -> ExpertSources:
    gate_up, down = numbers(NUM_EXPERTS * 2 * INNER, SIZE, seed=1), numbers(NUM_EXPERTS * SIZE, INNER, seed=2)
    if kind == "stored":
        return ExpertSources(Stored(gate_up, 2 * NUM_EXPERTS), Stored(down, NUM_EXPERTS), NUM_EXPERTS)
    given = GivenWeight(gate_up, None), GivenWeight(down, None)
    for each in given:
        each.quantization = ONLINE_FP8 if kind == "online" else None
    return ExpertSources(*given, NUM_EXPERTS)


@pytest.mark.parametrize("kind", ["plain", "stored", "online"])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_both_ways_give_the_same(kind: str, num_rows: int) -> None:
    ours, grouped = TorchExperts.build(sources(kind)), GroupedExperts.build(sources(kind))
    assert ours is not None and grouped is not None
    x, generator = numbers(num_rows, SIZE, seed=3), torch.Generator().manual_seed(4)
    chosen = torch.rand(num_rows, NUM_EXPERTS, generator=generator).topk(2).indices
    shares = torch.rand(num_rows, 2, generator=generator)
    torch.testing.assert_close(grouped(x, chosen, shares), ours(x, chosen, shares), atol=1e-3, rtol=1e-4)


def test_a_cpu_has_the_ones_of_torch() -> None:
    assert isinstance(choose_experts_product(sources("plain")), TorchExperts)
