"""The specification of FP8 against its definition: roundings to the nearest e4m3 number, and products of them."""

from __future__ import annotations

import pytest
import torch
from quantized import _nearest as nearest

from baton.kernels.products.fp8 import (
    BLOCK,
    E4M3,
    LARGEST,
    Fp8Weight,
    RoundedRows,
    add_rms_norm_round_ref_,
    dequantized,
    fp8_gated_linear_ref,
    fp8_linear_parts_ref,
    fp8_linear_ref,
    gates_fp8_ref,
    round_rows_ref,
    round_to_scale_ref,
    silu_mul_round_ref,
    spread,
)
from baton.kernels.products.norm import add_rms_norm_
from baton.kernels.products.silu import silu_mul


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("group", [128, 300, 7])
def test_the_largest_number_of_a_group_becomes_the_largest_of_e4m3(group: int) -> None:
    x = rows(3, 300)
    values, scales = round_rows_ref(x, group)
    assert values.dtype is E4M3 and scales.shape == (3, -(-300 // group))
    for part, own, scale in zip(x.split(group, 1), values.split(group, 1), scales.T, strict=True):
        torch.testing.assert_close(scale, part.abs().amax(1) / LARGEST)
        assert torch.equal(own.double(), nearest(part / scale[:, None]))
        assert torch.equal(own.float().abs().amax(1), torch.full((3,), LARGEST))


def test_scales_may_be_powers_of_two() -> None:
    x = rows(50, 256) * torch.exp2(torch.arange(-25.0, 25.0))[:, None]
    x[0] = torch.tensor([LARGEST * 2.0**-3] + [0.0] * 255)  # its scale is a power of two already
    values, scales = round_rows_ref(x, 128, has_power_of_two_scales=True)
    exact = x.view(50, 2, 128).abs().amax(-1) / LARGEST
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    assert (scales >= exact)[exact > 0].all() and (scales < 2 * exact)[exact > 0].all() and scales[0, 0] == 2.0**-3
    assert torch.equal(values.double(), nearest(x / scales.repeat_interleave(128, 1)))


def test_rows_of_zeros_stay_zeros() -> None:
    values, scales = round_rows_ref(torch.zeros(2, 8), 8)
    assert torch.equal(values.float(), torch.zeros(2, 8)) and torch.equal(scales, torch.ones(2, 1))


@pytest.mark.parametrize("is_power", [False, True])
@pytest.mark.parametrize("largest", [2.0**-149, 100 * 2.0**-149, 2.0**-141, 2.0**-140, 1e-38, 1e-35, 1e-30])
def test_the_smallest_numbers_are_rounded_to_numbers(largest: float, is_power: bool) -> None:
    """A group whose scale would be 0 has the scale 1, and becomes zeros. Every other group keeps its largest number."""
    x = torch.tensor([[largest, -largest / 2, 0.0, largest], [0.0, 0.0, 0.0, 0.0]])
    values, scales = round_rows_ref(x, 4, has_power_of_two_scales=is_power)
    assert scales is not None and (scales > 0).all() and scales[1] == 1
    exact = torch.tensor(largest) / LARGEST
    assert (scales[0] == 1) if exact == 0 else (exact <= scales[0] <= 2 * exact)
    assert torch.equal(values.double(), nearest((x / scales).clamp(-LARGEST, LARGEST)))
    assert (values[0, 0].float() == 0) == (exact == 0)


def test_a_stored_scale_cuts_what_is_too_large() -> None:
    values = round_to_scale_ref(torch.tensor([[1.0, 1000.0, -1000.0, 0.01]]), torch.tensor(2.0))
    assert torch.equal(values.double(), nearest(torch.tensor([[0.5, LARGEST, -LARGEST, 0.005]])))


def test_no_rows() -> None:
    values, scales = round_rows_ref(torch.zeros(0, 8), 8)
    assert values.shape == (0, 8) and scales.shape == (0, 1)


@pytest.mark.parametrize("has_rows", [False, True], ids=["blocks", "blocks of one row"])
def test_a_product_is_that_of_the_numbers_that_are_meant(has_rows: bool) -> None:
    x, weight, bias = rows(3, 300), rows(200, 300, seed=1).to(E4M3), rows(200, seed=2)
    scales = torch.rand(200 if has_rows else 2, 3) + 0.5
    values, x_scales = round_rows_ref(x, BLOCK)
    n, k = torch.arange(200)[:, None], torch.arange(300)
    meant = weight.float() * scales[n if has_rows else n // BLOCK, k // BLOCK]
    assert torch.equal(dequantized(weight, scales, BLOCK), meant)
    wide = values.float() * x_scales.repeat_interleave(BLOCK, 1)[:, :300]
    expected = (wide.double() @ meant.double().T + bias).float()
    given = RoundedRows(values, x_scales), Fp8Weight(weight, scales, BLOCK)
    ours = fp8_linear_ref(*given, bias, torch.float32)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)
    halves = fp8_linear_ref(*given, None, torch.bfloat16)
    torch.testing.assert_close(halves.float(), expected - bias, atol=0.1, rtol=0.01)


def test_what_stands_before_a_product_rounds_its_own_result() -> None:
    hidden, delta, gate_up = rows(3, 256), rows(3, 256, seed=1), rows(3, 512, seed=2)
    weight, eps = rows(256, seed=3), 0.5
    normed = add_rms_norm_(hidden.clone(), delta, weight, eps)
    for more in ({}, {"has_power_of_two_scales": False}, {"has_power_of_two_scales": True}):
        out, own = torch.empty(3, 256), hidden.clone()
        pairs = [
            (
                add_rms_norm_round_ref_(hidden.clone(), delta, weight, eps, 128, **more),
                round_rows_ref(normed, 128, **more),
            ),
            (
                add_rms_norm_round_ref_(own, delta, weight, eps, 128, **more, out=out),
                round_rows_ref(normed, 128, **more),
            ),
            (silu_mul_round_ref(gate_up, 128, **more), round_rows_ref(silu_mul(gate_up), 128, **more)),
        ]
        assert torch.equal(out, normed) and torch.equal(own, hidden + delta)
        for found, expected in pairs:
            assert torch.equal(found.values.float(), expected.values.float())
            assert found.scales is not None and expected.scales is not None
            assert torch.equal(found.scales, expected.scales)


def test_parts_and_gated_products_are_those_of_the_plain_product() -> None:
    weight = Fp8Weight(*round_rows_ref(rows(8, 256, seed=1), 128), 128)  # type: ignore[arg-type]
    for own in (round_rows_ref(rows(3, 256), 128), RoundedRows(rows(3, 256).bfloat16(), None)):
        for dtype in (torch.float32, torch.bfloat16):
            product = fp8_linear_ref(own, weight, None, dtype)
            parts, gated = fp8_linear_parts_ref(own, weight, dtype), fp8_gated_linear_ref(own, weight, dtype)
            assert product.dtype == parts.dtype == gated.dtype == dtype
            assert torch.equal(parts, product) and torch.equal(gated, silu_mul(product))
        assert not gates_fp8_ref(own, weight)


def test_rows_are_bounded_on_both_sides_and_one_scale_stands_for_all_columns() -> None:
    x = torch.tensor([[-1e9, -449.0, 449.0, 1e9]])
    bounded = [[-LARGEST, -LARGEST, LARGEST, LARGEST]]
    assert round_to_scale_ref(x, torch.tensor(1.0)).float().tolist() == bounded
    one, two = rows(3, 1), rows(3, 2)
    assert spread(one, 4, 7) is one  # not copied for each column
    assert torch.equal(spread(two, 4, 7), two[:, [0, 0, 0, 0, 1, 1, 1]])
