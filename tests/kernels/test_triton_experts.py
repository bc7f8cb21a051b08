"""The Triton kernels of experts against kernels/experts.py's specification."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from compile_kernels import SHARED_BYTES, shared_bytes
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, ULP, random

pytest.importorskip("triton")

from baton.kernels import triton_experts
from baton.kernels.experts import (
    ExpertWeight,
    experts_linear_ref,
    experts_of_row_ref,
    gated_experts_linear_ref,
    mix_parts_ref,
    place_experts_ref,
)
from baton.kernels.fp8 import BLOCK, E4M3, round_rows_ref
from baton.kernels.silu import SwigluClamp
from baton.kernels.triton_expert_row import experts_of_row

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp overflows aloud
DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def choose(num_rows: int, num_experts: int, num_active: int, seed: int = 0) -> Tensor:
    """Return different experts for each row, the first ones more often."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, num_experts, generator=generator) - torch.arange(num_experts) / num_experts / 2
    return scores.topk(num_active).indices.to(DEVICE)


def check(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    chosen: Tensor,
    num: int,
    dtype: torch.dtype,
    clamp: SwigluClamp | None = None,
) -> None:
    places = place_experts_ref(chosen, num)
    assert triton_experts.serves(x, x_scales, weight, places, dtype)
    for ours, theirs in (
        (triton_experts.experts_linear, experts_linear_ref),
        (
            functools.partial(triton_experts.gated_experts_linear, clamp=clamp),
            functools.partial(gated_experts_linear_ref, clamp=clamp),
        ),
    ):
        actual = ours(x, x_scales, weight, places, dtype).float()
        expected = theirs(x, x_scales, weight, places, torch.float32)
        bound = max(2e-3 * float(expected.abs().max()), 1e-5)  # FP8 tensor cores add with 14 bits or more
        torch.testing.assert_close(actual, expected, atol=bound, rtol=4 * ULP[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_experts", "num_active"), [(1, 7, 2), (33, 7, 3), (200, 3, 2)])
@pytest.mark.parametrize(("out_size", "in_size"), [(256, 128), (88, 72)])
def test_products_of_plain_weights(
    num_rows: int, num_experts: int, num_active: int, out_size: int, in_size: int, dtype: torch.dtype
) -> None:
    chosen = choose(num_rows, num_experts, num_active)
    weight = ExpertWeight(random(num_experts * out_size, in_size, seed=1, scale=0.2).to(dtype), None, in_size)
    check(random(num_rows, in_size, dtype=dtype), None, weight, chosen, num_experts, dtype)
    check(random(chosen.numel(), in_size, dtype=dtype), None, weight, chosen, num_experts, dtype)


@pytest.mark.parametrize(("num_rows", "num_experts", "num_active"), [(1, 7, 2), (200, 3, 2)])
@pytest.mark.parametrize(
    ("out_size", "in_size", "rows", "group"), [(256, 256, BLOCK, BLOCK), (88, 200, 1, BLOCK), (88, 72, 1, 72)]
)
def test_products_of_fp8(
    num_rows: int, num_experts: int, num_active: int, out_size: int, in_size: int, rows: int, group: int
) -> None:
    chosen = choose(num_rows, num_experts, num_active)
    scales = random(num_experts * out_size // rows, -(-in_size // group), seed=3).abs() * 0.02 + 0.01
    weight = ExpertWeight(random(num_experts * out_size, in_size, seed=1).to(E4M3), scales, group)
    x, x_scales = round_rows_ref(random(num_rows, in_size), group)
    check(x, x_scales, weight, chosen, num_experts, torch.float16)
    check(x, None, weight, chosen, num_experts, torch.float16)
    check(random(num_rows, in_size, dtype=torch.float16), None, weight, chosen, num_experts, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_experts", "num_active"), [(1, 7, 2), (33, 7, 3), (200, 3, 2)])
@pytest.mark.parametrize(("out_size", "in_size", "group"), [(256, 256, 32), (88, 96, 32), (88, 48, 16)])
def test_products_of_mxfp4_with_biases(
    num_rows: int, num_experts: int, num_active: int, out_size: int, in_size: int, group: int, dtype: torch.dtype
) -> None:
    """All bytes, and scales from 2^-12 to 2^0, with a gate that is clamped."""
    chosen, generator = choose(num_rows, num_experts, num_active), torch.Generator().manual_seed(1)
    rows = num_experts * out_size
    values = torch.randint(256, (rows, in_size // 2), dtype=torch.uint8, generator=generator).to(DEVICE)
    scales = torch.randint(115, 128, (rows, in_size // group), dtype=torch.uint8, generator=generator).to(DEVICE)
    weight = ExpertWeight(values, scales, group, random(rows, seed=2).to(dtype))
    clamp = SwigluClamp(7.0, 1.702)
    x = random(num_rows, in_size, seed=3, scale=0.3, dtype=dtype)
    check(x, None, weight, chosen, num_experts, dtype, clamp)
    check(x, None, weight._replace(bias=None), chosen, num_experts, dtype)


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 140, 200])
def test_numbers_of_mxfp4_are_exact(scale: int) -> None:
    """Each of the 16 values in each half of a byte, by a product with unit rows."""
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16)
    weight = ExpertWeight(values, torch.full((16, 1), scale, dtype=torch.uint8, device=DEVICE), 32)
    chosen = torch.zeros(32, 1, dtype=torch.int64, device=DEVICE)
    places, x = place_experts_ref(chosen, 1), torch.eye(32, device=DEVICE)
    found = triton_experts.experts_linear(x, None, weight, places, torch.float32)
    assert torch.equal(found, weight.numbers(1, torch.float32)[0].T)


def test_a_gate_is_clamped_and_experts_have_biases_in_any_format() -> None:
    chosen, clamp = choose(33, 7, 3), SwigluClamp(0.5, 0.9)
    plain = ExpertWeight(random(7 * 88, 72, seed=1), None, 72, random(7 * 88, seed=2))
    check(random(33, 72), None, plain, chosen, 7, torch.float32, clamp)
    scales = random(7 * 88, 1, seed=3).abs() * 0.02 + 0.01
    rounded = ExpertWeight(plain.values.to(E4M3), scales, 72, plain.bias)
    x, x_scales = round_rows_ref(random(33, 72), 72)
    check(x, x_scales, rounded, chosen, 7, torch.float16, clamp)


def test_what_is_not_served_is_left_to_the_reference() -> None:
    places = place_experts_ref(choose(2, 3, 1), 3)
    weight = ExpertWeight(random(24, 16), None, 16)
    assert not triton_experts.serves(random(2, 16).half(), None, weight, places, torch.float16)
    assert not triton_experts.serves(random(2, 32)[:, ::2], None, weight, places, torch.float32)
    halves = ExpertWeight(random(24, 200).to(E4M3), torch.ones(24, 4, device=DEVICE), 50)
    assert not triton_experts.serves(random(2, 200).to(E4M3), None, halves, places, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_active", "size"), [(1, 8, 1030), (5, 1, 7), (0, 2, 8)])
def test_parts_are_mixed(num_rows: int, num_active: int, size: int, dtype: torch.dtype) -> None:
    parts = random(num_rows * num_active, size, dtype=dtype)
    shares = random(num_rows, num_active, seed=1).abs()
    summands = random(3, num_rows, size, seed=2)
    for others in (None, summands[0].to(dtype), summands):
        assert triton_experts.serves_mix(parts, shares, others)
        actual = triton_experts.mix_parts(parts, shares, others)
        torch.testing.assert_close(actual, mix_parts_ref(parts, shares, others), atol=1e-5, rtol=2 * ULP[dtype])


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_row_does_not_depend_on_how_full_its_block_is(is_fp8: bool) -> None:
    """Bit by bit on a GPU. A block with few pairs is multiplied by a smaller tile."""
    few, many = (torch.tensor([0] * (230 - n) + [1] * n + [2] * 20, device=DEVICE).unsqueeze(1) for n in (40, 120))
    x, weight = random(250, 72, dtype=torch.float16), random(3 * 264, 72, seed=1, scale=0.2).half()
    x_scales, given = None, ExpertWeight(weight, None, 72)
    if is_fp8:
        x, x_scales = round_rows_ref(x, 72)
        given = ExpertWeight(*round_rows_ref(weight, 72), 72)
    found = [
        triton_experts.gated_experts_linear(x, x_scales, given, place_experts_ref(chosen, 3), torch.float16)
        for chosen in (few, many)
    ]
    for rows in (slice(110), slice(190, None)):
        bound = 2e-3 if IS_INTERPRETED else 0  # numpy's products depend on the shape
        torch.testing.assert_close(found[0][rows], found[1][rows], atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", [None, SwigluClamp(0.5, 0.9)])
@pytest.mark.parametrize(("num_experts", "num_active", "size", "inner_size"), [(7, 3, 88, 72), (16, 8, 128, 256)])
def test_experts_of_one_row(
    num_experts: int, num_active: int, size: int, inner_size: int, clamp: SwigluClamp | None, dtype: torch.dtype
) -> None:
    gate_up, down = (
        ExpertWeight(random(num_experts * rows, columns, seed=rows, scale=0.2).to(dtype), None, columns)
        for rows, columns in ((2 * inner_size, size), (size, inner_size))
    )
    if clamp is not None:
        gate_up, down = (
            each._replace(bias=random(len(each.values), seed=seed).to(dtype))
            for seed, each in enumerate((gate_up, down))
        )
    x, shares = random(1, size, dtype=dtype), random(1, num_active, seed=1).abs()
    args = (x, choose(1, num_experts, num_active), shares, gate_up, down, num_experts)
    actual, expected = experts_of_row(*args, clamp=clamp), experts_of_row_ref(*args, clamp=clamp)
    bound = max(4 * ULP[dtype] * float(expected.abs().max()), 1e-5)
    torch.testing.assert_close(actual, expected, atol=bound, rtol=4 * ULP[dtype])


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize(("size", "inner_size", "rows", "is_power"), [(256, 128, BLOCK, True), (200, 88, 1, False)])
def test_experts_of_one_row_of_fp8(size: int, inner_size: int, rows: int, is_power: bool, is_rounded: bool) -> None:
    num_experts, num_active = 7, 3

    def weight_of(num_rows: int, columns: int) -> ExpertWeight:
        group = BLOCK if rows == BLOCK else columns
        scales = random(num_rows // rows, -(-columns // group), seed=3).abs() * 0.02 + 0.01
        return ExpertWeight(random(num_rows, columns, seed=1).to(E4M3), scales, group)

    x, shares = random(1, size, dtype=torch.float16), random(1, num_active, seed=1).abs()
    gate_up, down = weight_of(num_experts * 2 * inner_size, size), weight_of(num_experts * size, inner_size)
    args = (x, choose(1, num_experts, num_active), shares, gate_up, down, num_experts)
    options = {"is_rounded": is_rounded, "has_power_of_two_scales": is_power}
    actual, expected = experts_of_row(*args, **options), experts_of_row_ref(*args, **options)
    bound = 2e-2 * float(expected.abs().max())  # an inner number may be rounded to the next one of FP8
    torch.testing.assert_close(actual, expected, atol=bound, rtol=1e-2)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU compiles what it runs")
def test_a_gpu_takes_the_kernels(tmp_path: Path) -> None:
    """Compiled for a GPU of compute capability 9.0, with the tiles that are launched."""
    found = shared_bytes("experts", tmp_path)
    assert len(found) == 35 and max(found.values()) <= SHARED_BYTES, found
