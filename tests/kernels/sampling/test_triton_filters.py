"""Thresholds without a sort against those of the sorted rows: each row keeps the same tokens."""

from __future__ import annotations

import math

import pytest
import torch
from thinned import thinned
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

from baton.kernels.sampling import triton_filters
from baton.kernels.sampling.filters import Filters
from baton.kernels.sampling.filters import score_thresholds as thresholds_ref
from baton.kernels.sampling.triton_filters import search_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud
INF, NAN, OFF = float("inf"), float("nan"), 2**31 - 1


def thresholds(logits: Tensor, temperatures: Tensor, filters: Filters) -> Tensor:
    return search_rows(logits, temperatures, filters).thresholds


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
    thinned(
        [
            (1, 1.0, torch.float32),
            (7, 2.0, torch.float16),
            (1000, 12.0, torch.bfloat16),
            (1000, 1.0, torch.float16),
            (4200, 0.05, torch.float32),
            (4200, 3.0, torch.bfloat16),
        ],
        lambda i, *_: i in (0, 1, 2, 4) or not IS_INTERPRETED,
    ),
)
def test_rows_keep_what_a_sort_keeps(vocab_size: int, scale: float, dtype: torch.dtype) -> None:
    """Flat and steep rows, with one greedy row among them."""
    logits = random(len(ROWS), vocab_size, dtype=dtype, seed=vocab_size, scale=scale)
    temperatures = torch.tensor([0.7, 1.0, 1.3, 0.0] * 3, device=DEVICE)
    check(logits, temperatures, columns(ROWS))


@pytest.mark.parametrize(
    ("top_k", "top_p"), thinned([(50, 1.0), (OFF, 0.9), (20_000, 0.7)], lambda i, *_: i == 1 or not IS_INTERPRETED)
)
def test_a_flat_row_of_a_real_vocabulary(top_k: int, top_p: float) -> None:
    logits = random(1, 128_256, dtype=torch.bfloat16, seed=1)
    check(logits, torch.ones(1, device=DEVICE), columns([(0.0, top_k, top_p)]))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter is slow; a GPU checks the size of real vocabularies")
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 8.0])
def test_rows_of_a_real_vocabulary(scale: float) -> None:
    """From rows of which most tokens are likely to rows of which few are."""
    rows = [*ROWS] * 16
    for dtype in (torch.float32, torch.bfloat16):
        logits = random(len(rows), 128_256, dtype=dtype, seed=3, scale=scale)
        check(logits, torch.tensor([0.7, 1.0, 1.3, 0.0], device=DEVICE).repeat(len(rows) // 4), columns(rows))


def shrink(monkeypatch: pytest.MonkeyPatch, *, most: int = 64, few: int = 16) -> None:
    """Make rows of some hundred logits as large for the kernels as those of real vocabularies."""
    sizes = {"_MOST_GATHERED": most, "_FEW": few, "_MOST_PARTS": 32, "_SPLIT_SIZE": 64, "_TILE": 128}
    for name, size in sizes.items():
        monkeypatch.setattr(triton_filters, name, size)


@pytest.mark.parametrize(("most", "few"), [(32, 16), (256, 16), (256, 256)])
def test_logits_are_searched_wherever_they_are(most: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few gathered, more gathered, fewer than top-k keeps, or in the row itself; several splits and tiles of each."""
    shrink(monkeypatch, most=most, few=few)
    rows = [ROWS[at] for at in (0, 2, 3, 6, 7)] + [(0.0, 150, 1.0), (0.0, 150, 0.5)]
    for scale in (0.2, 4.0) if most == few else (0.2,):
        logits = random(len(rows), 211, seed=most, scale=scale)
        check(logits, torch.ones(len(rows), device=DEVICE), columns(rows))


def hard_rows(count: int) -> dict[str, Tensor]:
    """Rows of unlike distributions, [count] each."""
    normal = random(count, seed=count).cpu()
    peak = normal * 0.05
    peak[count // 3], peak[7:47] = 15.0, 12.5 + peak[7:47]  # like a planted model's: a peak, a group, a flat tail
    return {
        "planted": peak,
        "flat": normal * 1e-3,
        "equal": torch.full((count,), 3.0),
        "two values": (normal > 0.5).float() * 3,
        "few values": normal.mul(2).round(),
        "zipf": -1.3 * torch.arange(1, count + 1).float().log()[torch.randperm(count)],
        "excluded": torch.where(normal > 1.5, normal, -INF),
    }


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    thinned(
        [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 100.0), (torch.bfloat16, 0.01)],
        lambda i, *_: i in (0, 3) or not IS_INTERPRETED,
    ),
)
def test_hard_rows(dtype: torch.dtype, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any distribution, with filters from the narrowest to the widest; most rows overflow what is gathered."""
    shrink(monkeypatch)
    count, rows = 400, hard_rows(400)
    filters = [(0.0, k, 1.0) for k in (1, 2, 50, count - 1, count)] + [(0.0, OFF, p) for p in (1e-9, 0.9, 1 - 1e-12)]
    filters += [(0.0, 300, 0.9), (0.3, 100, 0.99)]
    names = list(rows)[:: 1 if dtype is torch.float32 else 3]
    pairs = [(name, each) for name in names for each in filters]
    pairs = pairs[::2] if IS_INTERPRETED else pairs  # of ten filters every second one, and the others on a GPU
    logits = torch.stack([rows[name] for name, _ in pairs]).to(dtype).to(DEVICE)
    check(logits, torch.full((len(logits),), temperature, device=DEVICE), columns([each for _, each in pairs]))


@pytest.mark.parametrize("top_k", [50, 300])
def test_ties_beyond_what_is_gathered(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The k-th largest logit is one of more equals than fit: all of them stay."""
    shrink(monkeypatch)
    logits = random(2, 500, scale=0.1)
    logits[:, 100:350] = 5.0
    logits[:, :20] += 9.0
    kept = check(logits, torch.ones(2, device=DEVICE), columns([(0.0, top_k, 1.0), (0.0, top_k, 0.999999)]))
    assert kept[0].sum() == (270 if top_k <= 270 else 300)


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
