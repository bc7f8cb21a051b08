"""Searches for a threshold against sorted keys, and the passes that they take over a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thinned import every, is_whole
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

import triton
import triton.language as tl

from baton.kernels.sampling import triton_search
from baton.kernels.sampling.filters import _weights as weights_ref
from baton.kernels.sampling.triton_packed import score_of_key
from baton.kernels.sampling.triton_search import KEY_OF_LEAST, amount_above, largest_key, largest_key_of_row

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud
INF = float("inf")
NUM_LOGITS = 900


@triton.jit
def _bisect_kernel(keys_ptr, amounts_ptr, out_ptr, needed, SIZE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)
    low = tl.full((), KEY_OF_LEAST, tl.int32)
    tl.store(out_ptr, largest_key(tl.load(keys_ptr + at), tl.load(amounts_ptr + at), needed, low))


@pytest.mark.parametrize("needed", [1, 2, 17, 300, 5000])
def test_keys_are_bisected(needed: int) -> None:
    """If all amounts are less than what is needed, the least key is found."""
    generator = torch.Generator().manual_seed(needed)
    keys = -torch.randint(0, 2**31 - 2**24, (64,), generator=generator).to(torch.int32)
    amounts = torch.randint(0, 40, (64,), generator=generator)
    out = torch.empty(1, dtype=torch.int32, device=DEVICE)
    needed_there = torch.tensor(needed, dtype=torch.int64).item()
    _bisect_kernel[(1,)](keys.to(DEVICE), amounts.to(DEVICE), out, needed_there, SIZE=64)
    fitting = [key for key in keys.tolist() if int(amounts[keys >= key].sum()) >= needed]
    assert out.item() == max(fitting, default=KEY_OF_LEAST.value)


@triton.jit
def _row_kernel(
    row_ptr, needed_ptr, total_ptr, keys_ptr, out_ptr, above_ptr, num_logits, maximum,
    IS_WEIGHT: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    needed, total = tl.load(needed_ptr), tl.load(total_ptr)
    floor = (needed * 0 + KEY_OF_LEAST).to(tl.int32)
    key = largest_key_of_row(
        row_ptr, num_logits, maximum, maximum * 0.0 + 1.0, needed, total, floor, keys_ptr, IS_WEIGHT, MOST, TILE
    )
    tl.store(out_ptr, score_of_key(key))
    tl.store(above_ptr, amount_above(row_ptr, num_logits, maximum, maximum * 0.0 + 1.0, key, TILE))


def rows() -> dict[str, Tensor]:
    """Rows of many distributions, whose largest logit is 0."""
    count, generator = NUM_LOGITS, torch.Generator().manual_seed(0)
    normal = torch.randn(count, generator=generator)
    clusters = 2.0 ** -torch.randint(0, 40, (count,), generator=generator).float()
    masked = torch.where(torch.arange(count) % 50 == 7, normal, -INF)
    found = {
        "normal": normal,
        "flat": normal * 1e-3,
        "steep": normal * 50,
        "equal": torch.zeros(count),
        "two values": (normal > 0.5).float() * 3,
        "few values": normal.round(),
        "clusters": -20 * clusters * (1 + 1e-3 * torch.rand(count, generator=generator)),
        "sorted": normal.sort(descending=True).values,
        "most excluded": masked,
        "one peak": normal * 0.05 + (torch.arange(count) == 555) * 15.0,
        "bfloat16": normal.mul(3).to(torch.bfloat16).float(),
    }
    return {name: row - row.max() for name, row in found.items()}


def searched(row: Tensor, needed: int, *, is_weight: bool, most: int = 64) -> tuple[float, int]:
    """Return the score of the key that is found, and the weight from it on."""
    amounts = weights_ref(row[None])[0] if is_weight else torch.ones(len(row), dtype=torch.int64)
    numbers = [torch.tensor(each, device=DEVICE) for each in (needed, int(amounts.sum()))]
    keys = torch.empty(most, dtype=torch.int32, device=DEVICE)
    score, above = torch.empty(1, device=DEVICE), torch.empty(1, dtype=torch.int64, device=DEVICE)
    _row_kernel[(1,)](
        row.to(DEVICE), *numbers, keys, score, above, len(row), 0.0,
        IS_WEIGHT=is_weight, MOST=most, TILE=512, enable_fp_fusion=False,
    )  # fmt: skip
    return score.item(), int(above.item())


def threshold_ref(row: Tensor, needed: int, *, is_weight: bool) -> float:
    ranked = row.sort(descending=True).values
    amounts = weights_ref(ranked[None])[0] if is_weight else torch.ones(len(row), dtype=torch.int64)
    return ranked[int((amounts.cumsum(0) < needed).sum())].item()


@pytest.mark.each_value
@pytest.mark.parametrize("is_weight", [False, True])
@pytest.mark.parametrize("name", rows())
def test_a_row_is_searched_as_if_it_were_sorted(name: str, is_weight: bool) -> None:
    row = rows()[name]
    weights = weights_ref(row[None])[0]
    total = int(weights.sum()) if is_weight else len(row)
    for needed in {1, total * 9 // 10, total} if is_whole() else {total * 9 // 10}:
        score, above = searched(row, needed, is_weight=is_weight)
        assert score == threshold_ref(row, needed, is_weight=is_weight), needed
        assert above == int(weights[row >= score].sum())


@pytest.mark.skipif(not IS_INTERPRETED, reason="passes are counted in the interpreter")
@pytest.mark.parametrize("name", every(rows(), 2, first=1))
def test_a_search_takes_few_passes_over_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nearly always, also of equal scores; more if neighbours are alike, as they are in no vocabulary."""
    passes = count_passes(monkeypatch)
    row = rows()[name]
    for is_weight in (False, True):
        total = int(weights_ref(row[None]).sum()) if is_weight else len(row)
        passes.clear()
        searched(row, total * 9 // 10, is_weight=is_weight, most=128)
        assert len(passes) <= (8 if name == "sorted" else 4), (name, is_weight)


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each function that reads a row, when it does."""
    passes: list[str] = []
    for name in ("_amounts_above", "_collect"):
        function = getattr(triton_search, name)

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            passes.append(name)
            return function(*args)

        monkeypatch.setattr(triton_search, name, counted)
    return passes


def test_a_row_in_any_order_of_logits() -> None:
    row = random(NUM_LOGITS, seed=5).cpu()
    row -= row.max()
    order = torch.randperm(NUM_LOGITS, generator=torch.Generator().manual_seed(1))
    needed = int(weights_ref(row[None]).sum()) // 2
    assert searched(row, needed, is_weight=True) == searched(row[order], needed, is_weight=True)
