"""Experts in the format of their tensors: plain and FP8, by torch and by the operations that graphs can hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from quantized import Roundings
from recorded_roundings import recorded_roundings
from torch import Tensor

from baton.engine.checkpoint.quantization import ONLINE_FP8, Quantization
from baton.engine.products.base import GivenWeight, WeightSource
from baton.engine.products.experts import ExpertSources, GroupedExperts, TorchExperts, choose_experts_product
from baton.engine.products.fp8 import RowRounding
from baton.kernels.experts.mxfp4 import from_checkpoint, unpacked
from baton.kernels.formats import SwigluClamp
from baton.kernels.products.fp8 import E4M3, RoundedRows
from baton.kernels.products.norm import Norm, rms_norm

NUM_EXPERTS, SIZE, INNER = 5, 40, 24
CLAMP = SwigluClamp(1.5, 1.702)


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


class Packed(GivenWeight):
    """MXFP4 with a scale for each 8 columns, beside biases."""

    def __init__(self, out_size: int, in_size: int, seed: int) -> None:
        super().__init__(torch.empty(out_size, in_size), numbers(out_size, seed=seed))
        self.quantization, generator = Quantization("mxfp4", "none"), torch.Generator().manual_seed(seed)
        self._tensors = {
            "blocks": torch.randint(256, (out_size, in_size // 2), dtype=torch.uint8, generator=generator),
            "scales": torch.randint(122, 128, (out_size, in_size // 8), dtype=torch.uint8, generator=generator),
        }

    def has(self, name: str) -> bool:
        return name in self._tensors

    def parts(self, name: str) -> list[Tensor]:
        return list(self._tensors[name].chunk(NUM_EXPERTS))


def sources(kind: str) -> ExpertSources:
    if kind == "packed":
        packed = Packed(NUM_EXPERTS * 2 * INNER, SIZE, seed=1), Packed(NUM_EXPERTS * SIZE, INNER, seed=2)
        return ExpertSources(*packed, NUM_EXPERTS, CLAMP)
    gate_up, down = numbers(NUM_EXPERTS * 2 * INNER, SIZE, seed=1), numbers(NUM_EXPERTS * SIZE, INNER, seed=2)
    if kind == "stored":
        return ExpertSources(Stored(gate_up, 2 * NUM_EXPERTS), Stored(down, NUM_EXPERTS), NUM_EXPERTS)
    biases = (numbers(len(gate_up), seed=5), numbers(len(down), seed=6)) if "biased" in kind else (None, None)
    given = GivenWeight(gate_up, biases[0]), GivenWeight(down, biases[1])
    for each in given:
        each.quantization = ONLINE_FP8 if "online" in kind else None
    return ExpertSources(*given, NUM_EXPERTS, CLAMP if "biased" in kind else None, is_geglu="geglu" in kind)


@pytest.mark.parametrize("kind", ["plain", "geglu", "biased", "stored", "online", "online biased", "packed"])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_both_ways_give_the_same(kind: str, num_rows: int) -> None:
    ours, grouped = TorchExperts.build(sources(kind)), GroupedExperts.build(sources(kind))
    assert ours is not None and grouped is not None
    x, generator = numbers(num_rows, SIZE, seed=3), torch.Generator().manual_seed(4)
    chosen = torch.rand(num_rows, NUM_EXPERTS, generator=generator).topk(2).indices
    shares = torch.rand(num_rows, 2, generator=generator)
    with recorded_roundings() as roundings:
        expected = ours(x, chosen, shares)
        roundings.read()
    with following(roundings):
        torch.testing.assert_close(grouped(x, chosen, shares), expected, atol=1e-3, rtol=1e-4)
    assert roundings.num_followed <= 1  # of at most 1,152 numbers


@contextmanager
def following(roundings: Roundings) -> Iterator[None]:
    """Let rows be rounded as `roundings` says where a last bit decides."""
    rounded = RowRounding.__call__

    def settled(rounding: RowRounding, x: Tensor) -> RoundedRows:
        values, scales = rounded(rounding, x)
        if not rounding.group or not len(x):
            return RoundedRows(values, scales)
        scale, num_before = rounding.stored if scales is None else scales, roundings.num_followed
        assert scale is not None
        pairs = zip(x, values.float() * scale, strict=True)
        rows = torch.stack([roundings.settled(row, numbers, len(row)) for row, numbers in pairs])
        if roundings.num_followed == num_before:
            return RoundedRows(values, scales)
        return RoundedRows(rows if rounding.stored is None else rows / rounding.stored, None)

    with patch.object(RowRounding, "__call__", settled):
        yield


@pytest.mark.parametrize("kind", ["plain", "stored", "online"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_norm_leaves_rows_as_experts_take_them(kind: str, num_rows: int) -> None:
    experts, norm = GroupedExperts.build(sources(kind)), Norm(numbers(SIZE, seed=7), 1e-5)
    assert experts is not None
    hidden, delta = numbers(num_rows, SIZE, seed=3), numbers(num_rows, SIZE, seed=4)
    summed = hidden + delta
    normed, rows = experts.normed(hidden, delta, norm)
    assert torch.equal(hidden, summed)
    torch.testing.assert_close(normed, rms_norm(summed, *norm))
    assert isinstance(rows, RoundedRows) == (kind == "online")
    chosen, shares = torch.tensor([[0, 3], [4, 1], [2, 0]])[:num_rows], torch.full((num_rows, 2), 0.5)
    assert torch.equal(experts(rows, chosen, shares), experts(normed, chosen, shares))


@pytest.mark.parametrize("kind", ["stored", "online", "online biased"])
def test_fp8_is_served_in_16_bits(kind: str) -> None:
    given, x = sources(kind), numbers(9, SIZE, seed=3).bfloat16()
    for each in (given.gate_up, given.down):
        each.dtype = torch.bfloat16
    ours, grouped = TorchExperts.build(given), GroupedExperts.build(given)
    assert ours is not None and grouped is not None
    chosen, shares = torch.tensor([[0, 3], [4, 1], [2, 0]] * 3), torch.full((9, 2), 0.5)
    found, expected = ours(x, chosen, shares), grouped(x, chosen, shares)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), atol=0.02 * float(expected.abs().max()), rtol=0.02)


@pytest.mark.parametrize("kind", ["biased", "packed"])
def test_biases_and_a_clamped_gate_are_those_of_the_formula(kind: str) -> None:
    given, x = sources(kind), numbers(1, SIZE, seed=3)
    experts = TorchExperts.build(given)
    assert experts is not None
    weights = [_numbers(each).unflatten(0, (NUM_EXPERTS, -1)) for each in given[:2]]
    biases = [each.bias.unflatten(0, (NUM_EXPERTS, -1)) for each in given[:2] if each.bias is not None]
    chosen, shares = torch.tensor([[3, 1]]), torch.tensor([[0.75, 0.5]])
    expected = torch.zeros(SIZE)
    for expert, share in zip((3, 1), (0.75, 0.5), strict=True):
        gate, up = (weights[0][expert] @ x[0] + biases[0][expert]).chunk(2)
        gate, up = gate.clamp(max=CLAMP.limit), up.clamp(-CLAMP.limit, CLAMP.limit)
        inner = (up + 1) * gate * torch.sigmoid(CLAMP.alpha * gate)
        expected += share * (weights[1][expert] @ inner + biases[1][expert])
    torch.testing.assert_close(experts(x, chosen, shares)[0], expected, atol=1e-3, rtol=1e-4)


def _numbers(source: WeightSource) -> Tensor:
    if source.has("weight"):
        return source.fused("weight")
    stored = (torch.cat(source.parts(name)) for name in ("blocks", "scales"))
    return unpacked(*from_checkpoint(*stored), 8)


def test_a_cpu_has_the_ones_of_torch() -> None:
    assert isinstance(choose_experts_product(sources("plain")), TorchExperts)
