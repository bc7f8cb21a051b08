"""The filters of filters.py on a GPU, without a sort: exact, and without a read on the host.

Four launches find the thresholds of rows, and draw their tokens.

    1. `part_maxima` (triton_packed.py)  the largest logit of each part of a row, of some hundred parts
    2. `_plan_kernel`     chooses a score of each row, the level. From the k-th largest maximum on there are at least k
                          tokens, and hardly more, as likely tokens are scattered over the parts. For top-p, the level
                          is one of the lowest maxima, from which on there are some two thousand tokens
    3. `_gather_kernel`   gathers the logits from the level on, and sums the weight of the row if top-p needs it. For
                          top-k it reads only the splits of a row that have such logits. A row with neither needs no
                          search: its token is drawn here, by all its splits
    4. `_search_kernel`   searches the gathered logits for the thresholds (triton_search.py), and draws the row's token
                          among them. If they are too few or too many, it searches the row and draws from it

The level decides how many logits are searched, never what is found. Weights are integers, so sums have no order, and
every launch computes the same score of a logit. All tokens that a row keeps are at or above its threshold.
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

from .filters import Filters
from .sample import Choice
from .triton_draws import best_of_block, has_maximum, perturbed_largest
from .triton_noise import gumbel_from_bits_of, ids_at, random_bits
from .triton_packed import LOWEST, id_of, key_of, pack, part_maxima, score_of, score_of_key
from .triton_scores import scores_of, weights_of
from .triton_search import KEY_OF_LEAST, amount_above, largest_key, largest_key_of_row

_COLUMNS = (  # which lie as the batch size has them
    "temperatures_ptr", "log_min_p_ptr", "top_k_ptr", "top_p_ptr", "seeds_ptr", "positions_ptr",
)  # fmt: skip
_MOST_PARTS = 512  # of a row
_SPLIT_SIZE = 2048  # logits of a program that gathers
_MOST_GATHERED = 4096  # logits of a row
_FEW = 512  # gathered logits that a search need not pad to _MOST_GATHERED
_TILE = 1024  # logits that it reads at a time
_INFINITY = tl.constexpr(float("inf"))


class Draw(NamedTuple):
    """The noise of a draw among the tokens that a row keeps."""

    seeds: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    logit_ids: Tensor | None = None  # [num_logits] int32, the tokens of the logits; None: logit i is of token i


class Found(NamedTuple):
    """The result of `search_rows`."""

    thresholds: (
        Tensor  # [num_rows] float32, `filters.score_thresholds`; undefined for greedy rows and without a maximum
    )
    largest: Tensor  # [num_rows] int64, the row's largest logit, packed with its index
    choice: Choice | None  # the rows' tokens; None: none were drawn


def search_rows(logits: Tensor, temperatures: Tensor, filters: Filters, draw: Draw | None = None) -> Found:
    """Return the least score that each row keeps, of the scores (logit - row's largest) / temperature; with `draw` also
    the tokens of `perturbed_argmax_ref`.

    Args:
        logits: [num_rows, num_logits] float32, bfloat16 or float16, rows contiguous.
        temperatures: [num_rows] float32.
        filters: with `top_k` and `top_p`.
    """
    top_k, top_p = filters.top_k, filters.top_p
    assert top_k is not None and top_p is not None, "only min_p needs no search"
    num_rows, num_logits = logits.shape
    for column, dtype in ((filters.log_min_p, torch.float32), (top_k, torch.int64), (top_p, torch.float64)):
        assert column.shape == (num_rows,) and column.dtype == dtype and column.is_contiguous(), column
    device = logits.device
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    largest = torch.empty(num_rows, dtype=torch.int64, device=device)
    token_ids, is_valid = torch.empty_like(largest), torch.empty(num_rows, dtype=torch.bool, device=device)
    found = Found(thresholds, largest, None if draw is None else Choice(token_ids, is_valid))
    if num_rows == 0:
        return found
    part_size = max(8, triton.next_power_of_2(triton.cdiv(num_logits, _MOST_PARTS)))
    maxima = part_maxima(logits, part_size)
    num_parts = maxima.shape[1]
    split_size, tile = max(_SPLIT_SIZE, part_size), max(_TILE, part_size)
    levels, totals = torch.empty_like(thresholds), torch.empty_like(largest)
    most = min(_MOST_GATHERED, num_logits)
    gathered = torch.empty((num_rows, most), dtype=logits.dtype, device=device)
    gathered_index = torch.empty((num_rows, most), dtype=torch.int32, device=device)
    num_gathered = torch.empty(num_rows, dtype=torch.int32, device=device)
    row = (logits, logits.stride(0), num_logits, maxima, num_parts, largest, temperatures, *filters, levels, totals)
    seeds, positions, logit_ids = draw or (largest, largest, None)
    drawing = (seeds, positions, gathered_index if logit_ids is None else logit_ids, torch.empty_like(largest))
    how: dict[str, Any] = {"DRAWS": draw is not None, "MAPPED": logit_ids is not None, "enable_fp_fusion": False}
    _plan_kernel[(num_rows,)](
        *row[2:], num_gathered, *drawing, PARTS=triton.next_power_of_2(num_parts), num_warps=4, **how
    )
    _gather_kernel[num_rows, triton.cdiv(num_logits, split_size)](
        *row, gathered, gathered_index, num_gathered, most, *drawing,
        PARTS=split_size // part_size, BLOCK=split_size, num_warps=8, **how,
    )  # fmt: skip
    sizes: dict[str, Any] = {"FEW": _FEW, "MOST": _MOST_GATHERED, "TILE": tile, "PARTS": tile // part_size}
    _search_kernel[(num_rows,)](
        *row, gathered, gathered_index, num_gathered, most, *drawing, thresholds, token_ids, is_valid,
        num_warps=16, **sizes, **how,
    )  # fmt: skip
    return found


@triton.jit
def _needed(total, top_p):
    """Return the weight that the tokens must hold which top-p keeps, int64: at least 1."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _plan_kernel(
    num_logits,
    maxima_ptr,  # [num_rows, num_parts] int64, packed largest logits
    num_parts,
    largest_ptr,  # [num_rows] int64, written: the largest of them
    temperatures_ptr,  # [num_rows] float32
    log_min_p_ptr,  # [num_rows] float32
    top_k_ptr,  # [num_rows] int64
    top_p_ptr,  # [num_rows] float64
    levels_ptr,  # [num_rows] float32, written: logits with this score or a higher one are gathered; inf: none
    totals_ptr,  # [num_rows] int64, written: 0
    num_gathered_ptr,  # [num_rows] int32, written: 0
    seeds_ptr,  # [num_rows] int64, read if DRAWS
    positions_ptr,  # [num_rows] int64, likewise
    logit_ids_ptr,  # [num_logits] int32, read if MAPPED
    drawn_ptr,  # [num_rows] int64, written if DRAWS: the largest logit, packed with its perturbed score if rows draw it
    PARTS: tl.constexpr,  # the power of two for them
    DRAWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperatures_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    part = tl.arange(0, PARTS)
    maxima = tl.load(maxima_ptr + row * num_parts + part, mask=part < num_parts, other=LOWEST)
    largest = tl.max(maxima, axis=0)
    level = temperature * 0.0 + _INFINITY
    if has_maximum(largest) & (temperature != 0.0) & ((top_k < num_logits) | (top_p < 1.0)):
        scores = scores_of(score_of(maxima), score_of(largest), temperature)
        keys, is_part = key_of(scores), (part < num_parts).to(tl.int32)
        rank = top_k * 0 + (num_parts - num_parts // 100)  # int64, also if the launch knows num_parts to be 1
        if top_k < num_logits:
            rank = tl.minimum(rank, top_k)
        least = (rank * 0 + KEY_OF_LEAST).to(tl.int32)
        level = score_of_key(largest_key(keys, is_part, rank, least))
    if DRAWS:
        drawn = largest
        if has_maximum(largest) & (temperature != 0.0) & (level > 0.0):
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            drawn = perturbed_largest(largest, seed, position, num_logits, logit_ids_ptr, MAPPED)
        tl.store(drawn_ptr + row, drawn)
    tl.store(largest_ptr + row, largest)
    tl.store(levels_ptr + row, level)
    tl.store(totals_ptr + row, top_k * 0)
    tl.store(num_gathered_ptr + row, 0)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _gather_kernel(
    logits_ptr,  # [num_rows, num_logits], rows `stride` apart
    stride,
    num_logits,  # the next ones as for _plan_kernel
    maxima_ptr,
    num_parts,
    largest_ptr,
    temperatures_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    levels_ptr,
    totals_ptr,  # [num_rows] int64, counted up without top-k: weight of all that min-p keeps
    gathered_ptr,  # [num_rows, most] of the logits' dtype, written, in any order
    gathered_index_ptr,  # [num_rows, most] int32, written: their index in the row
    num_gathered_ptr,  # [num_rows] int32, counted up: finite logits above the level, also if they are more than `most`
    most,
    seeds_ptr,  # these as for _plan_kernel
    positions_ptr,
    logit_ids_ptr,
    drawn_ptr,  # raised if DRAWS to the token of a row without a level, packed with its perturbed score
    PARTS: tl.constexpr,  # of a split
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Grid: (num_rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    level, largest, temperature = tl.load(levels_ptr + row), tl.load(largest_ptr + row), tl.load(temperatures_ptr + row)
    part = split * PARTS + tl.arange(0, PARTS)
    maxima = tl.load(maxima_ptr + row * num_parts + part, mask=part < num_parts, other=LOWEST)
    maximum = score_of(largest)
    if level <= 0.0:
        has_top_k = tl.load(top_k_ptr + row) < num_logits
        has_some = scores_of(score_of(tl.max(maxima, axis=0)), maximum, temperature) >= level
        if has_some | (has_top_k == 0):
            index = split * BLOCK + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + row * stride + index, mask=index < num_logits, other=-float("inf"))
            scores = scores_of(logits.to(tl.float32), maximum, temperature)
            if has_top_k == 0:
                weights = tl.where(scores >= tl.load(log_min_p_ptr + row), weights_of(scores), 0)
                tl.atomic_add(totals_ptr + row, tl.sum(weights, axis=0), sem="relaxed")
            if has_some:
                is_above = (scores >= level) & (scores > -float("inf"))
                place = tl.cumsum(is_above.to(tl.int32), axis=0) - 1
                place += tl.atomic_add(num_gathered_ptr + row, tl.sum(is_above.to(tl.int32), axis=0), sem="relaxed")
                is_above = is_above & (place < most)
                tl.store(gathered_ptr + row * most + place, logits, mask=is_above)
                tl.store(gathered_index_ptr + row * most + place, index, mask=is_above)
    elif DRAWS:
        _draw_split(
            logits_ptr + row * stride, split * BLOCK, num_logits, tl.max(maxima, axis=0), largest, temperature,
            tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tl.load(log_min_p_ptr + row), logit_ids_ptr,
            drawn_ptr + row, MAPPED, BLOCK,
        )  # fmt: skip


@triton.jit
def _draw_split(
    row_ptr,
    start,
    num_logits,
    split_largest,
    largest,
    temperature,
    seed,
    position,
    threshold,
    logit_ids_ptr,
    drawn_ptr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise the row's token (`drawn_ptr`, packed with its perturbed score) to the best of BLOCK logits from `start` on,
    whose largest is `split_largest` (packed), if the row draws its token."""
    if has_maximum(largest) & (temperature != 0.0):
        maximum = score_of(largest)
        highest = scores_of(score_of(split_largest), maximum, temperature)
        if highest >= threshold:
            # Not read from `drawn_ptr`: other programs raise it, and threads that read unlike numbers would part ways.
            known = perturbed_largest(largest, seed, position, num_logits, logit_ids_ptr, MAPPED)
            drawn = best_of_block(
                row_ptr, start, num_logits, highest, maximum, temperature, seed, position, threshold, known,
                logit_ids_ptr, MAPPED, True, BLOCK,
            )  # fmt: skip
            if drawn > known:
                tl.atomic_max(drawn_ptr, drawn, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _search_kernel(
    logits_ptr,  # as for _gather_kernel, up to most
    stride,
    num_logits,
    maxima_ptr,
    num_parts,
    largest_ptr,
    temperatures_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    levels_ptr,
    totals_ptr,
    gathered_ptr,
    gathered_index_ptr,  # overwritten by keys if the row is searched
    num_gathered_ptr,
    most,
    seeds_ptr,
    positions_ptr,
    logit_ids_ptr,
    drawn_ptr,
    thresholds_ptr,  # [num_rows] float32, written
    token_ids_ptr,  # [num_rows] int64, written if DRAWS
    is_valid_ptr,  # [num_rows] bool, written if DRAWS
    FEW: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,  # of a tile
    DRAWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperatures_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    threshold, level, largest = tl.load(log_min_p_ptr + row), tl.load(levels_ptr + row), tl.load(largest_ptr + row)
    maximum, row_ptr = score_of(largest), logits_ptr + row * stride
    drawn, seed, position = largest, top_k, top_k
    if DRAWS:
        drawn, seed, position = tl.load(drawn_ptr + row), tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    is_found = level > 0.0  # the row's token is known
    if level <= 0.0:
        total, num_found = tl.load(totals_ptr + row), tl.load(num_gathered_ptr + row)
        least = key_of(threshold)
        of_row = (gathered_ptr + row * most, gathered_index_ptr + row * most)
        of_draw = (num_logits, maximum, temperature, top_k, top_p, seed, position, logit_ids_ptr)
        if num_found <= FEW:
            least, is_found, drawn = _among(*of_row, num_found, level, total, least, *of_draw, FEW, DRAWS, MAPPED)
        elif num_found <= MOST:
            least, is_found, drawn = _among(*of_row, num_found, level, total, least, *of_draw, MOST, DRAWS, MAPPED)
        if is_found == 0:
            least = key_of(threshold)
            of_scores, keys_ptr = (row_ptr, num_logits, maximum, temperature), gathered_index_ptr + row * most
            if top_k < num_logits:
                count, floor = total * 0 + num_logits, least * 0 + KEY_OF_LEAST
                key = largest_key_of_row(*of_scores, top_k, count, floor, keys_ptr, False, MOST, TILE)
                least = tl.maximum(least, key)
                if top_p < 1.0:
                    total = amount_above(*of_scores, least, TILE)
            if top_p < 1.0:
                needed = _needed(total, top_p)
                key = largest_key_of_row(*of_scores, needed, total, least, keys_ptr, True, MOST, TILE)
                least = tl.maximum(least, key)
        threshold = score_of_key(least)
    tl.store(thresholds_ptr + row, threshold)
    if DRAWS:
        if is_found == 0:
            drawn = perturbed_largest(largest, seed, position, num_logits, logit_ids_ptr, MAPPED)
            for start in range(0, num_logits, TILE):
                part = start // TILE * PARTS + tl.arange(0, PARTS)
                maxima = tl.load(maxima_ptr + row * num_parts + part, mask=part < num_parts, other=LOWEST)
                highest = scores_of(score_of(tl.max(maxima, axis=0)), maximum, temperature)
                if highest >= threshold:
                    drawn = best_of_block(
                        row_ptr, start, num_logits, highest, maximum, temperature, seed, position, threshold, drawn,
                        logit_ids_ptr, MAPPED, True, TILE,
                    )  # fmt: skip
        index = id_of(drawn)
        tl.store(token_ids_ptr + row, ids_at(index, num_logits, logit_ids_ptr, MAPPED))
        tl.store(is_valid_ptr + row, maximum == maximum)


@triton.jit
def _among(
    gathered_ptr,
    gathered_index_ptr,
    num_found,
    level,
    total,
    least,
    num_logits,
    maximum,
    temperature,
    top_k,
    top_p,
    seed,
    position,
    logit_ids_ptr,
    WIDTH: tl.constexpr,
    DRAWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Search the gathered logits of a row, at most WIDTH, and draw among those that are kept.

    Return the key of the threshold, at least `least`, whether it is found among these logits, and the packed token. If
    it is not found, the others are undefined. `total`: the weight that min-p leaves, read without top-k."""
    at = tl.arange(0, WIDTH)
    is_there = at < num_found
    logits = tl.load(gathered_ptr + at, mask=is_there, other=-float("inf")).to(tl.float32)
    scores = scores_of(logits, maximum, temperature)
    keys, weights = key_of(scores), weights_of(scores)
    lowest, is_found, drawn = key_of(level), top_k > 0, total * 0 + LOWEST
    if top_k < num_logits:
        # If the level is -inf, all others are -inf as well.
        is_found = (num_found >= top_k) | (level == -float("inf"))
        least = tl.maximum(least, largest_key(keys, is_there.to(tl.int32), top_k, lowest))
        total = tl.sum(tl.where(keys >= least, weights, 0), axis=0)
    if top_p < 1.0:
        needed = _needed(total, top_p)
        is_found = is_found & (tl.sum(weights, axis=0) >= needed)
        least = tl.maximum(least, largest_key(keys, weights, needed, lowest))
    if DRAWS:
        index = tl.load(gathered_index_ptr + at, mask=is_there, other=0)
        noise = gumbel_from_bits_of(random_bits(seed, position, ids_at(index, num_logits, logit_ids_ptr, MAPPED)))
        drawn = tl.max(tl.where(is_there & (keys >= least), pack(scores + noise, index), LOWEST), axis=0)
    return least, is_found, drawn
