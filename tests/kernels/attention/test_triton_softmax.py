"""The running softmax over tiles of keys, and the sum of its parts, against a softmax in float64."""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, random

pytest.importorskip("triton")

import triton
import triton.language as tl

from baton.kernels.attention.triton_shares import work
from baton.kernels.attention.triton_softmax import (
    combine_kernel,
    has_nan,
    nothing_seen,
    quotient,
    store_heads,
    store_part,
    weigh,
    weigh_seen,
)

ROWS, BLOCK_M, BLOCK_N = 5, 16, 16
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's of NaN and infinities, in the interpreter


def expected_of(scores: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return the softmax in base 2 of `scores` [..., rows, keys] times `values` [..., keys, dims]; 0 for a row of
    nothing but -inf."""
    weights = (scores.double() * scale * math.log(2)).softmax(-1).nan_to_num()
    return (weights @ values.double()).float()


@triton.jit
def weigh_kernel(
    out_ptr, has_nan_ptr, scores_ptr, is_seen_ptr, values_ptr, num_keys, scale,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (1,). Store the weighted mean of values [num_keys, HEAD_DIM] by scores [ROWS, num_keys]; with `is_seen`
    of the scores' shape, by `weigh_seen`."""
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    sums, total, highest = nothing_seen(BLOCK_M, BLOCK_D)
    for first in range(0, num_keys, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        at, is_in = rows[:, None] * num_keys + keys[None, :], (rows < ROWS)[:, None] & (keys < num_keys)[None, :]
        scores = tl.load(scores_ptr + at, mask=is_in, other=float("-inf"))
        is_value = (keys < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(values_ptr + keys[:, None] * HEAD_DIM + dims[None, :], mask=is_value, other=0.0)
        if is_seen_ptr is None:
            sums, total, highest = weigh(scores, scale, values, sums, total, highest)
        else:
            is_seen = tl.load(is_seen_ptr + at, mask=is_in, other=0) != 0
            sums, total, highest = weigh_seen(scores, is_seen, scale, values, sums, total, highest)
    tl.store(has_nan_ptr, has_nan(sums).to(tl.int32))
    store_heads(out_ptr, rows, quotient(sums, total), rows < ROWS, dims, HEAD_DIM)


def weighed(scores: Tensor, values: Tensor, scale: float, is_seen: Tensor | None = None) -> tuple[Tensor, bool]:
    """Return the weighted values [ROWS, head_dim], and what `has_nan` says of them."""
    num_keys, head_dim = values.shape
    out = torch.full((ROWS + 1, head_dim), 7.0, device=DEVICE)
    found = torch.empty(1, dtype=torch.int32, device=DEVICE)
    weigh_kernel[(1,)](
        out, found, scores, is_seen, values, num_keys, scale, ROWS=ROWS, HEAD_DIM=head_dim,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
    )  # fmt: skip
    assert (out[ROWS] == 7).all()  # only rows and dimensions that exist are stored
    return out[:ROWS], bool(found.item())


@pytest.mark.parametrize("head_dim", [10, 16, 72])
@pytest.mark.parametrize("num_keys", [1, 16, 37])
@pytest.mark.parametrize("spread", [1.0, 1e4], ids=["near", "far apart"])
def test_tiles_equal_the_whole(num_keys: int, head_dim: int, spread: float) -> None:
    """Scores rise in one row and fall in the next, so that the highest is found first, last or between; one row sees
    no key of the first tile, and one sees none at all. Exponentials of scores far apart overflow."""
    scores, values = random(ROWS, num_keys, scale=spread), random(num_keys, head_dim, seed=1)
    scores[0], scores[1] = scores[0].sort().values, scores[1].sort(descending=True).values
    scores[2, :BLOCK_N], scores[3] = -INF, -INF
    out, found = weighed(scores, values, 0.7)
    torch.testing.assert_close(out, expected_of(scores, values, 0.7), atol=2e-6, rtol=2e-5)
    assert not found and (out[3] == 0).all()


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_a_value_that_is_no_number_spoils_only_rows_that_see_it(number: float) -> None:
    """`weigh` tells by NaN in sums that it may have met one; `weigh_seen` says whose it is."""
    scores, values = random(ROWS, 37), random(37, 20, seed=1)
    is_seen = torch.ones(ROWS, 37, dtype=torch.bool, device=DEVICE)
    is_seen[:3, 20] = False
    scores = scores.masked_fill(~is_seen, -INF)
    clean, found = weighed(scores, values, 1.0)
    assert not found
    values[20, 3] = number
    _, found = weighed(scores, values, 1.0)
    assert found
    scores[1, 20] = NAN  # a key that is no number, and not seen either
    out, _ = weighed(scores, values, 1.0, is_seen)
    torch.testing.assert_close(out[:3], clean[:3])
    assert out[3:].isnan().all()


def test_a_score_that_is_no_number_stays_with_its_row() -> None:
    scores, values = random(ROWS, 20), random(20, 16, seed=1)
    clean, _ = weighed(scores, values, 1.0)
    scores[2, 4] = NAN
    for is_seen in (None, torch.ones(ROWS, 20, dtype=torch.bool, device=DEVICE)):
        out, found = weighed(scores, values, 1.0, is_seen)
        assert found and out[2].isnan().all()
        assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@triton.jit
def part_kernel(
    out_ptr, writes_ptr, parts_ptr, stats_ptr, items_ptr, arrivals_ptr, scores_ptr, values_ptr, seq_lens_ptr,
    num_splits, num_keys, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (1, then as `work` says). Weigh a split's keys, store its part; with arrivals store the result too, and
    count how often."""
    item, seq, split, num_splits, seq_len = work(items_ptr, seq_lens_ptr, num_splits, BLOCK_N)
    if num_splits < 0:
        return
    share = tl.cdiv(tl.cdiv(seq_len, BLOCK_N), num_splits) * BLOCK_N
    begin, end = split * share, tl.minimum((split + 1) * share, seq_len)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_row = rows < ROWS
    sums, total, highest = nothing_seen(BLOCK_M, BLOCK_D)
    for first in range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        at = (seq * ROWS + rows)[:, None] * num_keys + keys[None, :]
        scores = tl.load(scores_ptr + at, mask=is_row[:, None] & (keys < end)[None, :], other=float("-inf"))
        is_value = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
        at = (seq * num_keys + keys)[:, None] * HEAD_DIM + dims[None, :]
        sums, total, highest = weigh(
            scores, 1.0, tl.load(values_ptr + at, mask=is_value, other=0.0), sums, total, highest
        )
    out_rows = seq * ROWS + rows
    sums, total, is_row = store_part(
        parts_ptr, stats_ptr, arrivals_ptr, item, seq, split, num_splits, out_rows, ROWS, sums, total, highest,
        is_row, dims, begin < end, HEAD_DIM,
    )  # fmt: skip
    if arrivals_ptr is not None:
        store_heads(out_ptr, out_rows, quotient(sums, total), is_row, dims, HEAD_DIM)
        tl.atomic_add(writes_ptr + out_rows, 1, mask=is_row)


WAYS = ("by length", "by items")  # by which a launch of its own combines parts


@pytest.mark.each_value
@pytest.mark.parametrize("head_dim", [10, 72])
@pytest.mark.parametrize("way", [*WAYS, *(f"{way}, two at once" for way in WAYS), "last to arrive"])
def test_parts_equal_the_whole(way: str, head_dim: int) -> None:
    """Three sequences: of several splits, of one, and of more splits than tiles of keys, the last without keys. Memory
    holds NaN before; what is not written is not read, or has no influence."""
    seq_lens, most = [64, 9, 33], 4
    numbers = [4, 1, 3] if way.startswith("by length") else [4, 1, 4]  # of splits
    num_seqs, num_keys = len(seq_lens), max(seq_lens)
    scores, values = random(num_seqs, ROWS, num_keys, scale=3.0), random(num_seqs, num_keys, head_dim, seed=1)
    scores[0, 1, 16:32], scores[2, 3] = -INF, -INF  # a row that sees nothing of a split, and one that sees nothing
    words, firsts = [-1], []  # an item without work
    for seq, number in enumerate(numbers):
        firsts.append(len(words) | number << 40)
        words += [seq | split << 20 | number << 40 for split in range(number)]
    items = None if way.startswith("by length") else torch.tensor(words, device=DEVICE)
    lens = [0] + [length for length, number in zip(seq_lens, numbers, strict=True) for _ in range(number)]
    num_items = num_seqs * most if items is None else len(items)
    parts = torch.full((num_items * ROWS, head_dim), NAN, device=DEVICE)
    stats = torch.full((2, num_items * ROWS), NAN, device=DEVICE)
    out = torch.full((num_seqs * ROWS, head_dim), NAN, device=DEVICE)
    writes = torch.zeros(num_seqs * ROWS, dtype=torch.int32, device=DEVICE)
    arrivals = torch.zeros(num_seqs, dtype=torch.int32, device=DEVICE) if way == "last to arrive" else None
    of_seqs = torch.tensor(seq_lens, device=DEVICE)
    grid = (1, most, num_seqs) if items is None else (1, num_items, 1)
    launches = [items]
    if items is not None and arrivals is not None:  # every second item, then the others, so that sequences take turns
        is_even = torch.arange(num_items, device=DEVICE) % 2 == 0
        launches = [items.masked_fill(~is_even, -1), items.masked_fill(is_even, -1)]
    for each in launches:
        part_kernel[grid](
            out, writes, parts, stats, each, arrivals, scores, values,
            of_seqs if items is None else torch.tensor(lens, device=DEVICE), most, num_keys,
            ROWS=ROWS, HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        )  # fmt: skip
    if arrivals is None:
        block_d, at_once = 16, 2 if "two at once" in way else 4
        combine_kernel[(ROWS, num_seqs, triton.cdiv(head_dim, block_d))](
            out, parts, stats, None if items is None else torch.tensor(firsts, device=DEVICE), of_seqs, most,
            num_items * ROWS, HEAD_DIM=head_dim, SPLITS=at_once, HAS_MORE=at_once < most, MIN_SPLIT=BLOCK_N,
            BLOCK_D=block_d, DEPENDENT=False,
        )  # fmt: skip
    else:
        assert (writes == 1).all() and (arrivals == 0).all()  # each row once, and ready for the next layer
    for seq, seq_len in enumerate(seq_lens):
        expected = expected_of(scores[seq, :, :seq_len], values[seq, :seq_len], 1.0)
        torch.testing.assert_close(out.view(num_seqs, ROWS, -1)[seq], expected, atol=2e-6, rtol=2e-5)
