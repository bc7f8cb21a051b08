"""The Triton kernels that round rows to e4m3, against kernels/products/fp8.py's specification."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, ULP, random

pytest.importorskip("triton")

from baton.kernels.products import triton_fp8_rows, triton_norm, triton_silu
from baton.kernels.products.fp8 import E4M3, RoundedRows, round_rows_ref, round_to_scale_ref, spread

HALVES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]


def of_every_size() -> Tensor:
    """Return rows of numbers around every e4m3 number and every middle between two of them, and of all magnitudes."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = codes[~codes.isnan()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    exact = torch.cat((numbers, middles, middles.nextafter(middles + 1), middles.nextafter(middles - 1)))
    spread = random(4096).cpu() * torch.exp2(torch.randint(-40, 20, (4096,)).float())
    return torch.cat((exact, spread))[: 1024 * 5].view(5, -1).to(DEVICE)


def test_a_number_becomes_the_nearest_one() -> None:
    x, one = of_every_size(), torch.ones((), device=DEVICE)
    for scale in (one, one * 0.37, torch.tensor([[0.1], [3.0], [1.0], [0.37], [1e-3]], device=DEVICE)):
        assert torch.equal(triton_fp8_rows.round_to_scale(x, scale).float(), round_to_scale_ref(x, scale).float())


@pytest.mark.each_value
@pytest.mark.parametrize("is_power", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "group"), [(1024, 128), (1100, 128), (100, 128), (1100, 1100), (7, 7)])
def test_rows_are_rounded_as_by_the_reference(size: int, group: int, dtype: torch.dtype, is_power: bool) -> None:
    x = random(5, size, dtype=dtype) * torch.tensor([1.0, 1e-4, 300.0, 0.0, 448.0], device=DEVICE)[:, None].to(dtype)
    for rows in (x, torch.cat((x, x), 1)[:, :size]):  # the second is a view
        values, scales = triton_fp8_rows.round_rows(rows, group, has_power_of_two_scales=is_power)
        expected, their_scales = round_rows_ref(rows, group, has_power_of_two_scales=is_power)
        assert torch.equal(scales, their_scales)
        assert torch.equal(values.float(), expected.float())


@pytest.mark.each_value
@pytest.mark.parametrize("is_power", [False, True])
@pytest.mark.parametrize(("size", "group"), [(1024, 128), (1100, 128), (100, 128), (1100, 1100)])
@pytest.mark.parametrize("num_parts", [None, 0, 3])
def test_a_norm_rounds_its_result(size: int, group: int, num_parts: int | None, is_power: bool) -> None:
    dtype = HALVES[-1]
    hidden = torch.cat((random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=1)), 1)[:, :size]  # a view
    weight = random(size, dtype=torch.float32 if is_power else dtype, seed=2)
    delta = None if num_parts is None else random(5, size, dtype=dtype, seed=3)
    delta = delta if not num_parts else random(num_parts, 5, size, seed=3)
    summed = hidden.clone()
    normed = triton_norm.add_rms_norm_(summed, delta, weight, 1e-5)
    expected = triton_fp8_rows.round_rows(normed, group, has_power_of_two_scales=is_power)
    before, out = hidden.clone(), torch.empty_like(normed)
    options = {"has_power_of_two_scales": is_power}
    actual = triton_fp8_rows.add_rms_norm_round_(hidden, delta, weight, 1e-5, group, **options)
    kept = triton_fp8_rows.add_rms_norm_round_(before, delta, weight, 1e-5, group, **options, out=out)
    assert torch.equal(hidden, summed) and torch.equal(before, summed)
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(kept, actual, strict=True))
    torch.testing.assert_close(out, normed, rtol=ULP[dtype], atol=0)
    check_alike(actual, expected, group, ULP[dtype])


@pytest.mark.parametrize("is_power", [False, True])
@pytest.mark.parametrize("largest", [2.0**-149, 100 * 2.0**-149, 1e-35])
def test_the_smallest_numbers_are_rounded_as_by_the_reference(largest: float, is_power: bool) -> None:
    x = torch.tensor([[largest, -largest / 2, 0.0, largest], [0.0] * 4], device=DEVICE)
    values, scales = triton_fp8_rows.round_rows(x, 4, has_power_of_two_scales=is_power)
    expected, their_scales = round_rows_ref(x, 4, has_power_of_two_scales=is_power)
    assert torch.equal(scales, their_scales) and torch.equal(values.float(), expected.float())


def check_alike(actual: RoundedRows, expected: RoundedRows, group: int, tolerance: float) -> None:
    """Check rows that were rounded from numbers of which some differ by a last bit."""
    assert actual.scales is not None and expected.scales is not None
    torch.testing.assert_close(actual.scales, expected.scales, rtol=tolerance, atol=0)
    size = actual.values.shape[1]
    numbers = [each.values.float() * spread(each.scales, group, size) for each in (actual, expected)]
    differ = (numbers[0] - numbers[1]).abs() > 2 * tolerance * numbers[1].abs()
    assert differ.float().mean() < 2e-2, differ.float().mean()  # to the next number of e4m3
    torch.testing.assert_close(*numbers, rtol=0.13, atol=1e-3)


@pytest.mark.parametrize("is_power", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("size", "group"), [(1024, 128), (1100, 128), (100, 128), (1100, 1100)])
def test_a_gate_rounds_its_result(size: int, group: int, dtype: torch.dtype, is_power: bool) -> None:
    gate_up = random(3, 2 * size, dtype=dtype)
    rows = triton_fp8_rows.silu_mul_round(gate_up, group, has_power_of_two_scales=is_power)
    expected = triton_fp8_rows.round_rows(triton_silu.silu_mul(gate_up), group, has_power_of_two_scales=is_power)
    assert torch.equal(rows.scales, expected.scales)
    assert torch.equal(rows.values.float(), expected.values.float())


def test_no_rows() -> None:
    x = random(0, 64)
    assert triton_fp8_rows.round_rows(x, 64).values.shape == (0, 64)
    assert triton_fp8_rows.round_to_scale(x, torch.ones((), device=DEVICE)).shape == (0, 64)
    assert triton_fp8_rows.silu_mul_round(x, 32).values.shape == (0, 32)
    assert triton_fp8_rows.add_rms_norm_round_(x, None, x.new_ones(64), 1e-5, 64).values.shape == (0, 64)
