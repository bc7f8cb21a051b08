"""The thresholds of kernels/filters.py on a GPU, without a sort: exact, and without a read on the host.

Four launches find them.

    1. `row_max_kernel` (triton_sample.py)  the largest logit of each split of a row
    2. `_levels_kernel`   sums, in each split, all weights, and what lies above a few fixed scores, the levels
    3. `_gather_kernel`   chooses the highest level that is surely not above the threshold, and gathers the logits above
                          it; they are few, since a row that is worth filtering has few likely tokens
    4. `_search_kernel`   searches the gathered logits for the thresholds, bit by bit; the whole row, if there are more
                          than fit. If they are few, it draws the row's token, too: no other can be drawn

Weights are integers (kernels/filters.py), so sums have no order, and every launch computes the same score of a logit.
Scores are searched as integer keys in their order: the threshold is the largest key at and above which there are k
tokens, or the weight that top-p needs. Levels need no exact sums: float32 and a margin choose one.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803, ARG001
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .filters import EXP2_COEFFICIENTS, LOG2_E, MIN_SCORE, WEIGHT_BITS, Filters
from .triton_noise import gumbel_from_bits_of, ids_at, random_bits
from .triton_packed import LOWEST, key_of, pack, row_max, score_of, score_of_key

_NUM_LEVELS = 6
_COLUMNS = (  # which lie as the batch size has them
    "temperatures_ptr", "log_min_p_ptr", "top_k_ptr", "top_p_ptr", "seeds_ptr", "positions_ptr",
)  # fmt: skip
_SPLIT_SIZE = 4096  # ids of a program
_MOST_GATHERED = 4096  # logits of a row
_FEW = 1024  # logits that are searched in registers
_TILE = 4096  # logits that a search of many reads at a time

_LOG2_E, _MIN_SCORE = tl.constexpr(LOG2_E), tl.constexpr(MIN_SCORE)
_E0, _E1, _E2, _E3, _E4, _E5, _E6 = (tl.constexpr(each) for each in EXP2_COEFFICIENTS)
_SCALE_BIAS = tl.constexpr(127 + WEIGHT_BITS)
_ROUNDER = tl.constexpr(1.5 * 2**23)  # added to a small float32 and subtracted again, it rounds as torch.round does
_MARGIN = tl.constexpr(1.0 + 2.0**-10)  # far above the error of a float32 sum of a row
_KEY_OF_LEAST = tl.constexpr(-2139095041)  # of the score -inf


class Draw(NamedTuple):
    """The noise of a draw among the tokens that a row keeps."""

    seeds: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    logit_ids: Tensor | None = None  # [num_logits] int32, the tokens of the logits; None: logit i is of token i


def score_thresholds(
    logits: Tensor, largest: Tensor, temperatures: Tensor, filters: Filters, draw: Draw | None = None
) -> tuple[Tensor, Tensor]:
    """Return `filters.score_thresholds`, [num_rows] float32, of the scores (logit - row's largest) / temperature; and,
    with `draw`, the index of each row's drawn logit, packed with its perturbed score, [num_rows] int64. It is LOWEST
    for rows without top-k and top-p, and for rows that may keep many tokens: they are to be drawn from all.

    Args:
        logits: [num_rows, num_logits] float32, bfloat16 or float16, rows contiguous.
        largest: [num_rows, splits] int64, packed largest logits of splits of a row.
        temperatures: [num_rows] float32; the threshold of a row of temperature 0 is any.
        filters: with `top_k` and `top_p`.
    """
    top_k, top_p = filters.top_k, filters.top_p
    assert top_k is not None and top_p is not None, "only min_p needs no search"
    num_rows, num_logits = logits.shape
    for column, dtype in ((filters.log_min_p, torch.float32), (top_k, torch.int64), (top_p, torch.float64)):
        assert column.shape == (num_rows,) and column.dtype == dtype and column.is_contiguous(), column
    device = logits.device
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    drawn = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return thresholds, drawn
    splits = triton.cdiv(num_logits, _SPLIT_SIZE)
    levels = torch.empty((num_rows, splits, _NUM_LEVELS), dtype=torch.float32, device=device)
    totals = torch.empty((num_rows, splits), dtype=torch.int64, device=device)
    most = min(_MOST_GATHERED, num_logits)
    gathered = torch.empty((num_rows, most), dtype=logits.dtype, device=device)
    gathered_index = torch.empty((num_rows, most), dtype=torch.int32, device=device)
    num_gathered = torch.empty(num_rows, dtype=torch.int32, device=device)
    row = (logits, logits.stride(0), num_logits, largest, largest.shape[1], temperatures, *filters)
    sizes: dict[str, Any] = {"MAX_SPLITS": triton.next_power_of_2(largest.shape[1]), "enable_fp_fusion": False}
    width = triton.next_power_of_2(splits)
    _levels_kernel[num_rows, splits](
        *row, levels, totals, num_gathered,
        NUM_LEVELS=_NUM_LEVELS, BLOCK=_SPLIT_SIZE, num_warps=8, **sizes,
    )  # fmt: skip
    _gather_kernel[num_rows, splits](
        *row, levels, totals, gathered, gathered_index, num_gathered, splits, most,
        NUM_LEVELS=_NUM_LEVELS, LEVELS=triton.next_power_of_2(_NUM_LEVELS), SPLITS=width, BLOCK=_SPLIT_SIZE,
        num_warps=8, **sizes,
    )  # fmt: skip
    seeds, positions, logit_ids = draw or (drawn, drawn, None)
    _search_kernel[(num_rows,)](
        *row, totals, gathered, gathered_index, num_gathered, seeds, positions,
        drawn if logit_ids is None else logit_ids, thresholds, drawn, splits, most,
        SPLITS=width, FEW=_FEW, TILE=_TILE, DRAWS=draw is not None, MAPPED=logit_ids is not None, num_warps=16, **sizes,
    )  # fmt: skip
    return thresholds, drawn


@triton.jit
def scores_of(logits, maximum, temperature):
    """Return (logits - max) / temperature, rounded at each step as torch rounds."""
    return tl.div_rn(logits - maximum, tl.zeros_like(logits) + temperature)


@triton.jit
def _weights_of(scores):
    """Return `filters._weights` of scores at most 0, int64."""
    return _real_weights_of(scores).to(tl.int64)


@triton.jit
def _real_weights_of(scores):
    """Return the weights before they are rounded down, float32."""
    exponent = tl.where(scores < _MIN_SCORE, _MIN_SCORE, scores) * _LOG2_E
    whole = (exponent + _ROUNDER) - _ROUNDER
    fraction = exponent - whole
    power = fraction * _E6
    power = (power + _E5) * fraction
    power = (power + _E4) * fraction
    power = (power + _E3) * fraction
    power = (power + _E2) * fraction
    power = (power + _E1) * fraction
    scale = ((whole.to(tl.int32) + _SCALE_BIAS) << 23).to(tl.float32, bitcast=True)
    return (power + _E0) * scale


@triton.jit
def _level(index):
    """Return the score of a level: -0.75, -2.25, -4.5, -7.5, -11.25, -15.75."""
    return (index + 1) * (index + 2) * -0.375


@triton.jit
def _add_each(a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6):
    """Return the sums of seven pairs: seven columns are reduced at once."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6


@triton.jit
def _needed(total, top_p):
    """Return the weight that the tokens must hold which top-p keeps, int64: at least 1."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit
def _is_searched(temperature, top_k, top_p, num_logits):
    """Return whether a row's threshold depends on its scores."""
    return (temperature != 0.0) & ((top_k < num_logits) | (top_p < 1.0))


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _levels_kernel(
    logits_ptr,  # [num_rows, num_logits], rows `stride` apart
    stride,
    num_logits,
    largest_ptr,  # [num_rows, num_maxima] int64 packed logits
    num_maxima,
    temperatures_ptr,  # [num_rows] float32
    log_min_p_ptr,  # [num_rows] float32
    top_k_ptr,  # [num_rows] int64
    top_p_ptr,  # [num_rows] float64
    levels_ptr,  # [num_rows, splits, NUM_LEVELS] float32, written: tokens above each level if top-k is on, else weights
    totals_ptr,  # [num_rows, splits] int64, written: weight of all that min-p keeps
    num_gathered_ptr,  # [num_rows] int32, written: 0
    NUM_LEVELS: tl.constexpr,  # 6
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperatures_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if _is_searched(temperature, top_k, top_p, num_logits):
        index = split * BLOCK + tl.arange(0, BLOCK)
        maximum = score_of(row_max(largest_ptr, row, num_maxima, MAX_SPLITS))
        logits = tl.load(logits_ptr + row * stride + index, mask=index < num_logits, other=-float("inf")).to(tl.float32)
        scores = scores_of(logits, maximum, temperature)
        weights = _real_weights_of(scores)
        total = tl.where(scores >= tl.load(log_min_p_ptr + row), weights.to(tl.int64), 0)
        amount = tl.where((top_k < num_logits) & (index < num_logits), 1.0, weights)
        l0, l1, l2, l3, l4, l5, total = tl.reduce(
            (
                tl.where(scores >= _level(0), amount, 0.0),
                tl.where(scores >= _level(1), amount, 0.0),
                tl.where(scores >= _level(2), amount, 0.0),
                tl.where(scores >= _level(3), amount, 0.0),
                tl.where(scores >= _level(4), amount, 0.0),
                tl.where(scores >= _level(5), amount, 0.0),
                total,
            ),
            0,
            _add_each,
        )
        at = row * tl.num_programs(1) + split
        tl.store(totals_ptr + at, total)
        tl.store(levels_ptr + at * NUM_LEVELS, l0)
        tl.store(levels_ptr + at * NUM_LEVELS + 1, l1)
        tl.store(levels_ptr + at * NUM_LEVELS + 2, l2)
        tl.store(levels_ptr + at * NUM_LEVELS + 3, l3)
        tl.store(levels_ptr + at * NUM_LEVELS + 4, l4)
        tl.store(levels_ptr + at * NUM_LEVELS + 5, l5)
        if split == 0:
            tl.store(num_gathered_ptr + row, 0)


@triton.jit
def _weight_left(totals_ptr, row, splits, SPLITS: tl.constexpr):
    """Return the weight of all tokens of a row that min-p keeps, int64."""
    split = tl.arange(0, SPLITS)
    return tl.sum(tl.load(totals_ptr + row * splits + split, mask=split < splits, other=0), axis=0)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _gather_kernel(
    logits_ptr,  # as for _levels_kernel, up to totals
    stride,
    num_logits,
    largest_ptr,
    num_maxima,
    temperatures_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    levels_ptr,
    totals_ptr,
    gathered_ptr,  # [num_rows, most] of the logits' dtype, written, in any order
    gathered_index_ptr,  # [num_rows, most] int32, written: their index in the row
    num_gathered_ptr,  # [num_rows] int32, 0, counted up: logits above the level, also if they are more than `most`
    splits,
    most,
    NUM_LEVELS: tl.constexpr,
    LEVELS: tl.constexpr,  # the power of two for them
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperatures_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if _is_searched(temperature, top_k, top_p, num_logits):
        level, other = tl.arange(0, LEVELS), tl.arange(0, SPLITS)
        at = (row * splits + other)[:, None] * NUM_LEVELS + level[None, :]
        is_there = (other < splits)[:, None] & (level < NUM_LEVELS)[None, :]
        levels = tl.sum(tl.load(levels_ptr + at, mask=is_there, other=0.0), axis=0)
        if top_k < num_logits:
            is_enough = levels >= top_k.to(tl.float32)
        else:
            is_enough = levels >= _needed(_weight_left(totals_ptr, row, splits, SPLITS), top_p).to(tl.float32) * _MARGIN
        chosen = tl.min(tl.where(is_enough & (level < NUM_LEVELS), level, NUM_LEVELS), axis=0)  # NUM_LEVELS: all
        is_own = tl.load(levels_ptr + (row * splits + split) * NUM_LEVELS + chosen, mask=chosen < NUM_LEVELS, other=1.0)
        if is_own > 0.0:
            index = split * BLOCK + tl.arange(0, BLOCK)
            maximum = score_of(row_max(largest_ptr, row, num_maxima, MAX_SPLITS))
            logits = tl.load(logits_ptr + row * stride + index, mask=index < num_logits, other=-float("inf"))
            scores = scores_of(logits.to(tl.float32), maximum, temperature)
            is_above = (index < num_logits) & ((chosen == NUM_LEVELS) | (scores >= _level(chosen)))
            place = tl.cumsum(is_above.to(tl.int32), axis=0) - 1
            place += tl.atomic_add(num_gathered_ptr + row, tl.sum(is_above.to(tl.int32), axis=0))
            is_above = is_above & (place < most)
            tl.store(gathered_ptr + row * most + place, logits, mask=is_above)
            tl.store(gathered_index_ptr + row * most + place, index, mask=is_above)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _search_kernel(
    logits_ptr,  # as for _gather_kernel, without levels, up to num_gathered
    stride,
    num_logits,
    largest_ptr,
    num_maxima,
    temperatures_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    totals_ptr,
    gathered_ptr,
    gathered_index_ptr,
    num_gathered_ptr,
    seeds_ptr,  # [num_rows] int64, read if DRAWS
    positions_ptr,  # [num_rows] int64, likewise
    logit_ids_ptr,  # [num_logits] int32, read if MAPPED
    thresholds_ptr,  # [num_rows] float32, written
    drawn_ptr,  # [num_rows] int64, written if DRAWS: the packed token, LOWEST if it was not drawn
    splits,
    most,
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    DRAWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperatures_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    log_min_p = tl.load(log_min_p_ptr + row)
    drawn = top_k * 0 + LOWEST
    if _is_searched(temperature, top_k, top_p, num_logits):
        maximum = score_of(row_max(largest_ptr, row, num_maxima, MAX_SPLITS))
        total = _weight_left(totals_ptr, row, splits, SPLITS)
        least, num_found = key_of(log_min_p).to(tl.int64), tl.load(num_gathered_ptr + row)
        gathered_ptr += row * most
        if num_found <= FEW:
            at = tl.arange(0, FEW)
            found = tl.load(gathered_ptr + at, mask=at < num_found, other=-float("inf")).to(tl.float32)
            scores = scores_of(found, maximum, temperature)
            keys, weights, is_found = key_of(scores).to(tl.int64), _weights_of(scores), (at < num_found).to(tl.int64)
            if top_k < num_logits:
                least = tl.maximum(least, _largest_key(keys, is_found, top_k))
                total = tl.sum(tl.where(keys >= least, weights, 0), axis=0)
            if top_p < 1.0:
                least = tl.maximum(least, _largest_key(keys, weights, _needed(total, top_p)))
            if DRAWS:
                index = tl.load(gathered_index_ptr + row * most + at, mask=at < num_found, other=0)
                ids = ids_at(index, num_logits, logit_ids_ptr, MAPPED)
                noise = random_bits(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids)
                packed = pack(scores + gumbel_from_bits_of(noise), index)
                is_kept = (keys >= least) | (scores != scores)  # an infinite logit less the largest is no number
                drawn = tl.max(tl.where((at < num_found) & is_kept, packed, LOWEST), axis=0)
        elif num_found <= most:
            least = _searched(
                gathered_ptr, num_found, maximum, temperature, top_k, top_p, num_logits, least, total, TILE
            )
        else:
            row_ptr = logits_ptr + row * stride
            least = _searched(row_ptr, num_logits, maximum, temperature, top_k, top_p, num_logits, least, total, TILE)
        tl.store(thresholds_ptr + row, score_of_key(least.to(tl.int32)))
    else:
        tl.store(thresholds_ptr + row, log_min_p)
    if DRAWS:
        tl.store(drawn_ptr + row, drawn)


@triton.jit
def _largest_key(keys, amounts, needed):
    """Return the largest key at and above which the amounts are `needed` (both int64) or more in sum."""
    low = needed * 0 + _KEY_OF_LEAST
    high = needed * 0
    for _ in range(31):
        middle = low + ((high - low + 1) >> 1)
        is_enough = tl.sum(tl.where(keys >= middle, amounts, 0), axis=0) >= needed
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@triton.jit
def _searched(ptr, count, maximum, temperature, top_k, top_p, num_logits, least, total, TILE: tl.constexpr):
    """Return the key of a row's threshold, at least `least`, searched among `count` logits in memory. `total` is the
    weight that min-p leaves."""
    if top_k < num_logits:
        least = tl.maximum(least, _largest_key_of_many(ptr, count, maximum, temperature, top_k, False, TILE))
        total = _amount_above(ptr, count, maximum, temperature, least, True, TILE)
    if top_p < 1.0:
        needed = _needed(total, top_p)
        least = tl.maximum(least, _largest_key_of_many(ptr, count, maximum, temperature, needed, True, TILE))
    return least


@triton.jit
def _largest_key_of_many(ptr, count, maximum, temperature, needed, IS_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """Return what `_largest_key` does, of `count` logits in memory: of their weights if IS_WEIGHT."""
    low = needed * 0 + _KEY_OF_LEAST
    high = needed * 0
    for _ in range(31):
        middle = low + ((high - low + 1) >> 1)
        is_enough = _amount_above(ptr, count, maximum, temperature, middle, IS_WEIGHT, TILE) >= needed
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@triton.jit
def _amount_above(ptr, count, maximum, temperature, key, IS_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """Return the weight or number of the logits whose scores have this key or a larger one, int64."""
    amount = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        logits = tl.load(ptr + at, mask=at < count, other=-float("inf")).to(tl.float32)
        scores = scores_of(logits, maximum, temperature)
        is_above = (at < count) & (key_of(scores).to(tl.int64) >= key)
        if IS_WEIGHT:
            amount += tl.where(is_above, _weights_of(scores), 0)
        else:
            amount += is_above.to(tl.int64)
    return tl.sum(amount, axis=0)
