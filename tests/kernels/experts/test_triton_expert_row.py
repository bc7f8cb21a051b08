"""All experts of one row against kernels/experts/experts.py's specification."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from thinned import thinned
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, ULP, random

pytest.importorskip("triton")

from expert_case import DTYPES, choose

from baton.kernels.experts import triton_expert_row
from baton.kernels.experts.experts import ExpertWeight, experts_of_row_ref, gated_experts_of_row_ref
from baton.kernels.experts.triton_expert_row import RowTiles
from baton.kernels.formats import SwigluClamp
from baton.kernels.products.fp8 import BLOCK, E4M3, round_rows_ref

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp overflows aloud


class Row(NamedTuple):
    """A row of x, and the experts that it chose."""

    x: Tensor  # [1, size]
    chosen: Tensor  # [1, num_active] int64
    shares: Tensor  # [1, num_active] float32
    num_experts: int

    @classmethod
    def make(cls, num_experts: int, num_active: int, size: int, dtype: torch.dtype) -> Row:
        x, shares = random(1, size, dtype=dtype), random(1, num_active, seed=1).abs()
        return cls(x, choose(1, num_experts, num_active), shares, num_experts)

    def check(
        self,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        clamp: SwigluClamp | None = None,
        others: Tensor | None = None,
        *,
        is_rounded: bool = False,
        is_power: bool = False,
        tiles: RowTiles | None = None,
    ) -> None:
        """Compare both products with the specification, of the same rows."""
        x, chosen, shares, num_experts = self
        dtype = x.dtype

        def rows(numbers: Tensor, weight: ExpertWeight) -> tuple[Tensor, Tensor | None]:
            if not is_rounded:
                return numbers, None
            return round_rows_ref(numbers, weight.group, has_power_of_two_scales=is_power)

        args = (*rows(x, gate_up), gate_up, chosen, num_experts, dtype, clamp)
        inner = gated_experts_of_row_ref(*args)
        self._close(triton_expert_row.gated_experts_of_row(*args, tiles=tiles), inner)
        args = (*rows(inner, down), down, chosen, num_experts, shares, dtype, others)
        self._close(triton_expert_row.experts_of_row(*args, tiles=tiles), experts_of_row_ref(*args))

    def _close(self, actual: Tensor, expected: Tensor) -> None:
        ulp = ULP[self.x.dtype]
        bound = max(4 * ulp * float(expected.abs().max()), 1e-5)
        torch.testing.assert_close(actual, expected, atol=bound, rtol=4 * ulp)


@pytest.mark.parametrize(
    ("sizes", "clamp", "dtype"),
    thinned(
        itertools.product([(7, 3, 88, 72), (16, 8, 128, 256), (5, 1, 200, 384)], [None, SwigluClamp(0.5, 0.9)], DTYPES),
        lambda i, *_: i in (2, 7, 9) or not IS_INTERPRETED,
    ),
    ids=str,
)
def test_experts_of_one_row(sizes: tuple[int, int, int, int], clamp: SwigluClamp | None, dtype: torch.dtype) -> None:
    num_experts, num_active, size, inner_size = sizes
    gate_up, down = (
        ExpertWeight(random(num_experts * rows, columns, seed=rows, scale=0.2).to(dtype), None, columns)
        for rows, columns in ((2 * inner_size, size), (size, inner_size))
    )
    if clamp is not None:
        gate_up, down = (
            each._replace(bias=random(len(each.values), seed=seed).to(dtype))
            for seed, each in enumerate((gate_up, down))
        )
    others = None if clamp is None else random(1, size, seed=5, dtype=dtype) if size == 88 else random(2, 1, size)
    Row.make(num_experts, num_active, size, dtype).check(gate_up, down, clamp, others)


@pytest.mark.parametrize("tiles", thinned([RowTiles(1, 16), RowTiles(4, 128), RowTiles(2, 512)], lambda i, _: i > 0))
def test_every_division_gives_the_same_products(tiles: RowTiles) -> None:
    sizes = (2 * 150, 200), (200, 150)
    gate_up, down = (ExpertWeight(random(4 * n, k, seed=n, scale=0.2), None, k) for n, k in sizes)
    Row.make(4, 2, 200, torch.float32).check(gate_up, down, tiles=tiles)


def test_there_may_be_more_pairs_than_warps() -> None:
    """A GPU refuses a program of more than 32 warps. The interpreter has no warps, and checks the sum."""
    gate_up, down = (ExpertWeight(random(40 * n, k, seed=n, scale=0.2), None, k) for n, k in ((2 * 8, 16), (16, 8)))
    Row.make(40, 33, 16, torch.float32).check(gate_up, down)


@pytest.mark.each_value
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize(("size", "inner_size", "rows", "is_power"), [(256, 128, BLOCK, True), (200, 88, 1, False)])
def test_experts_of_one_row_of_fp8(size: int, inner_size: int, rows: int, is_power: bool, is_rounded: bool) -> None:
    num_experts, num_active = 7, 3

    def weight_of(num_rows: int, columns: int) -> ExpertWeight:
        group = BLOCK if rows == BLOCK else columns
        scales = random(num_rows // rows, -(-columns // group), seed=3).abs() * 0.02 + 0.01
        return ExpertWeight(random(num_rows, columns, seed=1).to(E4M3), scales, group)

    gate_up, down = weight_of(num_experts * 2 * inner_size, size), weight_of(num_experts * size, inner_size)
    row = Row.make(num_experts, num_active, size, torch.float16)
    row.check(gate_up, down, is_rounded=is_rounded, is_power=is_power)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", [None, SwigluClamp(0.5, 0.9, 0.25)])
@pytest.mark.parametrize(("size", "inner_size", "group"), [(96, 64, 32), (256, 48, 16)])
def test_experts_of_one_row_of_mxfp4(
    size: int, inner_size: int, group: int, clamp: SwigluClamp | None, dtype: torch.dtype
) -> None:
    num_experts, generator = 7, torch.Generator().manual_seed(1)

    def weight_of(num_rows: int, columns: int) -> ExpertWeight:
        values = torch.randint(256, (num_rows, columns // 2), dtype=torch.uint8, generator=generator)
        scales = torch.randint(117, 124, (num_rows, columns // group), dtype=torch.uint8, generator=generator)
        return ExpertWeight(values.to(DEVICE), scales.to(DEVICE), group, random(num_rows, seed=2).to(dtype))

    gate_up, down = weight_of(num_experts * 2 * inner_size, size), weight_of(num_experts * size, inner_size)
    Row.make(num_experts, 3, size, dtype).check(gate_up, down, clamp, None if clamp is None else random(2, 1, size))
