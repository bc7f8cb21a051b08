"""Packed scores have the order of (score, then lower id), and give both back."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from baton.kernels.sampling.triton_packed import id_of, key_of, pack, row_max, score_of, score_of_key

INF, NAN = float("inf"), float("nan")
SCORES = torch.tensor([-INF, -3e38, -1.5, -1e-45, 0.0, 1e-45, 1e-38, 2.0, 3e38, INF]).tolist()  # rising
MOST_IDS = 2**31 - 1


@triton.jit
def _pack_kernel(scores_ptr, ids_ptr, packed_ptr, back_ptr, keys_ptr, COUNT: tl.constexpr):  # noqa: N803
    at = tl.arange(0, COUNT)
    scores = tl.load(scores_ptr + at)
    packed = pack(scores, tl.load(ids_ptr + at))
    tl.store(packed_ptr + at, packed)
    tl.store(back_ptr + at, score_of(packed))
    tl.store(ids_ptr + at, id_of(packed).to(tl.int32))
    tl.store(keys_ptr + at, score_of_key(key_of(scores)))


def run(scores: list[float], ids: list[int]) -> tuple[list[int], Tensor, list[int], Tensor]:
    count = triton.next_power_of_2(len(scores))
    padded = torch.zeros(count, device=DEVICE)
    padded[: len(scores)] = torch.tensor(scores, device=DEVICE)
    id_column = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    id_column[: len(ids)] = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    packed = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    back, keys = torch.zeros_like(padded), torch.zeros_like(padded)
    _pack_kernel[(1,)](padded, id_column, packed, back, keys, COUNT=count)
    used = slice(len(scores))
    return packed[used].tolist(), back[used].cpu(), id_column[used].tolist(), keys[used].cpu()


def test_order_and_back() -> None:
    pairs = list(itertools.product(SCORES, (MOST_IDS - 1, 7, 0)))  # a lower id counts as more
    packed, back, ids, keys = run([score for score, _ in pairs], [id_ for _, id_ in pairs])
    assert packed == sorted(packed) and len(set(packed)) == len(packed)
    assert list(zip(back.tolist(), ids, strict=True)) == pairs
    assert keys.tolist() == [score for score, _ in pairs]


def test_zeros_are_equal_and_nan_is_above_all() -> None:
    (zero, minus, infinite, nan), back, _, _ = run([0.0, -0.0, INF, -NAN], [3, 3, 3, 3])
    assert zero == minus < infinite < nan
    assert back[3].isnan()


@triton.jit
def _row_max_kernel(packed_ptr, out_ptr, row, splits, SPLITS: tl.constexpr):  # noqa: N803
    tl.store(out_ptr, row_max(packed_ptr, tl.program_id(0) + row, splits, SPLITS))


def test_the_largest_of_a_row() -> None:
    packed = torch.tensor([[5, -(2**62), 1], [-9, -(2**63) + 1, -10]], device=DEVICE)
    for row, expected in ((0, 5), (1, -9)):
        out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        _row_max_kernel[(1,)](packed, out, row, 3, SPLITS=4)
        assert out.item() == expected
