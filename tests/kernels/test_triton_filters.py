"""Thresholds without a sort against those of the sorted rows: each row keeps the same tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

import triton
import triton.language as tl

from baton.kernels import triton_filters
from baton.kernels.filters import Filters
from baton.kernels.filters import _weights as weights_ref
from baton.kernels.filters import score_thresholds as thresholds_ref
from baton.kernels.triton_filters import _weights_of, score_thresholds
from baton.kernels.triton_sample import _row_max_kernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud
INF, NAN, OFF = float("inf"), float("nan"), 2**31 - 1
SPLIT = 256  # of the largest logits


def thresholds(logits: Tensor, temperatures: Tensor, filters: Filters) -> Tensor:
    splits = triton.cdiv(logits.shape[1], SPLIT)
    largest = torch.empty((len(logits), splits), dtype=torch.int64, device=logits.device)
    _row_max_kernel[(len(logits), splits)](logits, largest, logits.stride(0), logits.shape[1], BLOCK=SPLIT)
    return score_thresholds(logits, largest, temperatures, filters)[0]


def columns(rows: list[tuple[float, int, float]]) -> Filters:
    """The filters of rows of (min_p, top_k, top_p)."""
    min_p, top_k, top_p = zip(*rows, strict=True)
    log_min_p = torch.tensor([math.log(each) if each else -INF for each in min_p], device=DEVICE)
    return Filters(
        log_min_p, torch.tensor(top_k, device=DEVICE), torch.tensor(top_p, dtype=torch.float64, device=DEVICE)
    )


def check(logits: Tensor, temperatures: Tensor, filters: Filters) -> Tensor:
    """Assert that each row that is not greedy keeps what the reference keeps. Return what it keeps."""
    scores = (logits.float() - logits.float().amax(1, keepdim=True)) / temperatures.unsqueeze(1).clamp(min=1e-9)
    expected = thresholds_ref(scores.cpu(), Filters(*(each.cpu() for each in filters))).to(DEVICE)
    actual, is_drawn = thresholds(logits, temperatures, filters), temperatures != 0
    kept = scores >= actual.unsqueeze(1)
    assert torch.equal(kept[is_drawn], (scores >= expected.unsqueeze(1))[is_drawn])
    return kept


ROWS = [
    (0.0, OFF, 1.0),
    (0.0, 1, 1.0),
    (0.0, 50, 1.0),
    (0.0, OFF, 0.9),
    (0.0, OFF, 0.1),
    (0.0, OFF, 0.9999),
    (0.02, OFF, 0.95),
    (0.001, 20, 0.8),
    (0.5, 900, 1.0),
    (0.0, 700, 0.999),
    (0.0, OFF, 0.0),
    (1.0, 3, 0.5),
]


@pytest.mark.parametrize(
    ("vocab_size", "scale", "dtype"),
    [
        (1, 1.0, torch.float32),
        (7, 2.0, torch.float16),
        (1000, 12.0, torch.bfloat16),
        (1000, 1.0, torch.float16),
        (4200, 0.05, torch.float32),
        (4200, 3.0, torch.bfloat16),
    ],
)
def test_rows_keep_what_a_sort_keeps(vocab_size: int, scale: float, dtype: torch.dtype) -> None:
    """Flat and steep rows, with one greedy row among them."""
    logits = random(len(ROWS), vocab_size, dtype=dtype, seed=vocab_size, scale=scale)
    temperatures = torch.tensor([0.7, 1.0, 1.3, 0.0] * 3, device=DEVICE)
    check(logits, temperatures, columns(ROWS))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter is slow; a GPU checks the size of real vocabularies")
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 8.0])
def test_rows_of_a_real_vocabulary(scale: float) -> None:
    """From rows of which most tokens are likely to rows of which few are."""
    rows = [*ROWS] * 16
    for dtype in (torch.float32, torch.bfloat16):
        logits = random(len(rows), 128_256, dtype=dtype, seed=3, scale=scale)
        check(logits, torch.tensor([0.7, 1.0, 1.3, 0.0], device=DEVICE).repeat(len(rows) // 4), columns(rows))


@pytest.mark.parametrize(("most", "few"), [(32, 16), (300, 16), (300, 256)])
def test_logits_are_searched_wherever_they_are(most: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few in registers, more gathered, too many in the row itself; several splits and tiles of each."""
    monkeypatch.setattr(triton_filters, "_MOST_GATHERED", most)
    monkeypatch.setattr(triton_filters, "_FEW", few)
    monkeypatch.setattr(triton_filters, "_SPLIT_SIZE", 64)
    monkeypatch.setattr(triton_filters, "_TILE", 128)
    rows = [ROWS[at] for at in (0, 2, 3, 6, 7)]
    for scale in (0.2, 4.0):
        logits = random(len(rows), 211, seed=most, scale=scale)
        check(logits, torch.ones(len(rows), device=DEVICE), columns(rows))


def test_equal_scores_stay_or_go_together() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]], device=DEVICE)
    for row in ((0.0, 2, 1.0), (0.0, OFF, 0.5), (0.0, 3, 0.5)):
        kept = check(logits, torch.ones(1, device=DEVICE), columns([row]))
        assert kept.tolist() == [[True, True, True, True, False]]


def test_banned_ids_stay_banned() -> None:
    logits = torch.full((4, 700), -INF, device=DEVICE)
    logits[:, 17] = 0.0
    rows = [(0.0, 5, 1.0), (0.0, OFF, 0.9), (0.1, OFF, 0.5), (0.01, 500, 0.99)]
    actual = thresholds(logits, torch.ones(4, device=DEVICE), columns(rows))
    for row, least in enumerate(actual.tolist()):
        assert least == -INF or (logits[row] >= least).nonzero().tolist() == [[17]]


def test_a_row_of_no_numbers_harms_no_other() -> None:
    logits = random(3, 900, scale=3.0)
    rows = columns([(1e-4, 700, 0.5)] * 3)
    temperatures = torch.ones(3, device=DEVICE)
    alone = thresholds(logits, temperatures, rows)
    logits[0, 5] = NAN
    logits[1] = INF
    assert thresholds(logits, temperatures, rows)[2] == alone[2]


def test_rows_may_be_apart() -> None:
    table = random(4, 1000, scale=2.0)
    rows = columns([(0.0, 30, 0.9)] * 4)
    temperatures = torch.ones(4, device=DEVICE)
    assert torch.equal(
        thresholds(table[:, :800], temperatures, rows), thresholds(table[:, :800].contiguous(), temperatures, rows)
    )


def test_no_rows() -> None:
    assert thresholds(
        random(0, 50),
        torch.ones(0, device=DEVICE),
        columns(ROWS[:1])._replace(
            log_min_p=torch.ones(0, device=DEVICE),
            top_k=torch.ones(0, dtype=torch.int64, device=DEVICE),
            top_p=torch.ones(0, dtype=torch.float64, device=DEVICE),
        ),
    ).shape == (0,)


@triton.jit
def _weights_kernel(scores_ptr, out_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, _weights_of(scores), mask=at < count)


def test_weights_have_the_bits_of_the_reference() -> None:
    """Where exponents are rounded half to even, too."""
    halves = (torch.arange(-64, 1) / 2 / 1.4426950216293335).float()
    ends = torch.tensor([0.0, -0.0, -INF, -1e30, -32.0, -32.1, -31.9, -1e-30])
    scores = torch.cat([torch.linspace(-33, 0, 30_001), halves, torch.nextafter(halves, ends[:1]), ends])
    out = torch.empty(len(scores), dtype=torch.int64, device=DEVICE)
    grid = (triton.cdiv(len(scores), 1024),)
    _weights_kernel[grid](scores.to(DEVICE), out, len(scores), BLOCK=1024, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), weights_ref(scores[None])[0])
