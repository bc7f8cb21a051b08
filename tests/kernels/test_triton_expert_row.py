"""All experts of one row against kernels/experts.py's specification."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, ULP, random

pytest.importorskip("triton")

from expert_case import DTYPES, choose

from baton.kernels.experts import ExpertWeight, experts_of_row_ref
from baton.kernels.fp8 import BLOCK, E4M3
from baton.kernels.silu import SwigluClamp
from baton.kernels.triton_expert_row import experts_of_row

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp overflows aloud


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
    others = None if clamp is None else random(1, size, seed=5, dtype=dtype) if size == 88 else random(2, 1, size)
    actual, expected = (by(*args, clamp=clamp, others=others) for by in (experts_of_row, experts_of_row_ref))
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
    expected = experts_of_row_ref(*args, **options)
    bound = 2e-2 * float(expected.abs().max())  # an inner number may be rounded to the next one of FP8
    torch.testing.assert_close(experts_of_row(*args, **options), expected, atol=bound, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", [None, SwigluClamp(0.5, 0.9)])
@pytest.mark.parametrize(("size", "inner_size", "group"), [(96, 64, 32), (256, 48, 16)])
def test_experts_of_one_row_of_mxfp4(
    size: int, inner_size: int, group: int, clamp: SwigluClamp | None, dtype: torch.dtype
) -> None:
    num_experts, generator = 7, torch.Generator().manual_seed(1)

    def weight_of(num_rows: int, columns: int) -> ExpertWeight:
        values = torch.randint(256, (num_rows, columns // 2), dtype=torch.uint8, generator=generator)
        scales = torch.randint(117, 124, (num_rows, columns // group), dtype=torch.uint8, generator=generator)
        return ExpertWeight(values.to(DEVICE), scales.to(DEVICE), group, random(num_rows, seed=2).to(dtype))

    x, shares = random(1, size, dtype=dtype), random(1, 3, seed=1).abs()
    gate_up, down = weight_of(num_experts * 2 * inner_size, size), weight_of(num_experts * size, inner_size)
    args = (x, choose(1, num_experts, 3), shares, gate_up, down, num_experts)
    others = None if clamp is None else random(2, 1, size)
    actual, expected = (by(*args, clamp=clamp, others=others) for by in (experts_of_row, experts_of_row_ref))
    bound = max(4 * ULP[dtype] * float(expected.abs().max()), 1e-5)
    torch.testing.assert_close(actual, expected, atol=bound, rtol=4 * ULP[dtype])
