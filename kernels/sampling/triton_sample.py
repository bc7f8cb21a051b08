"""The operations of sample.py and best_tokens.py on a GPU: a row is split over the vocabulary, and the host reads
nothing.

The noise has the bits of noise.py: the same IEEE operations in the same order, compiled without fusion of
multiplications into additions. Differences and divisions round as torch's do.

Scores are packed with their ids (triton_packed.py), so a row's token does not depend on how a row is split. There are
three launches. `part_maxima` finds the largest logit of each part of a row, the second kernel the best score of each
part, the third the best of the row. If all rows are greedy, the second one is left out. The second kernel computes the
noise of all tokens. With many programs per row this is faster than to look for the few tokens that can be drawn; one
program per row looks for them instead (triton_draws.py). If rows have top-k or top-p, triton_filters.py draws their
tokens.

If logits are of some tokens alone, all kernels rank the indices of logits. They read a token's id where they draw its
noise, and the last kernel returns ids.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import check_token_ids
from .sample import Choice, Draws
from .triton_draws import has_maximum
from .triton_filters import Draw, search_rows
from .triton_noise import check_columns, gumbel_from_bits_of, ids_at, random_bits
from .triton_packed import LOWEST, id_of, pack, part_maxima, row_max, score_of
from .triton_scores import scores_of

MAX_TOPK = 20
_COLUMNS = ("seeds_ptr", "positions_ptr", "temperatures_ptr", "thresholds_ptr")  # which lie as the batch size has them
_PART_SIZE = 1024  # logits of a program
_TOPK_SPLIT_SIZE = 2048


def perturbed_argmax(logits: Tensor, draws: Draws | None = None, logit_ids: Tensor | None = None) -> Choice:
    """Return `perturbed_argmax_ref`."""
    _check(logits, draws, logit_ids)
    num_rows, num_logits = logits.shape
    filters = None if draws is None else draws.filters
    if draws is not None and filters is not None and filters.top_k is not None:
        draw = Draw(draws.seeds, draws.positions, logit_ids)
        choice = search_rows(logits, draws.temperatures, filters, draw).choice
        assert choice is not None
        return choice
    largest = part_maxima(logits, _PART_SIZE)
    num_parts = largest.shape[1]
    best = largest if draws is None else torch.empty_like(largest)
    if draws is not None and num_rows:
        ids = best if logit_ids is None else logit_ids
        _perturbed_max_kernel[num_rows, num_parts](
            logits, largest, best, *draws[:3], draws.temperatures if filters is None else filters.log_min_p,
            ids, logits.stride(0), num_logits, num_parts,
            FILTERED=filters is not None, MAPPED=logit_ids is not None, PART=_PART_SIZE,
            PARTS=triton.next_power_of_2(num_parts), enable_fp_fusion=False,
        )  # fmt: skip
    return choose(largest, best, logit_ids)


def choose(largest: Tensor, best: Tensor, logit_ids: Tensor | None = None) -> Choice:
    """Return the token of each row, given the packed logits `largest` and scores `best` of its parts, each [num_rows,
    num_parts] int64. `logit_ids` as for `perturbed_argmax`: the ids of packed indices."""
    num_rows, num_parts = largest.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=largest.device)
    is_valid = torch.empty(num_rows, dtype=torch.bool, device=largest.device)
    ids = token_ids if logit_ids is None else logit_ids
    if num_rows:
        _choose_kernel[(num_rows,)](
            largest, best, token_ids, is_valid, ids, len(ids), num_parts,
            MAPPED=logit_ids is not None, PARTS=triton.next_power_of_2(num_parts),
        )  # fmt: skip
    return Choice(token_ids, is_valid)


def serves_topk(logits: Tensor, k: int, *_: object, **__: object) -> bool:
    """Return whether `perturbed_topk` finds so many, of any logits."""
    del logits
    return k <= MAX_TOPK


def perturbed_topk(
    logits: Tensor, k: int, draws: Draws | None = None, logit_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `perturbed_topk_ref`; `k` is at most MAX_TOPK and the number of logits."""
    _check(logits, draws, logit_ids)
    num_rows, num_logits = logits.shape
    assert 1 <= k <= min(MAX_TOPK, num_logits), (k, num_logits)
    splits = triton.cdiv(num_logits, _TOPK_SPLIT_SIZE)
    token_ids = torch.empty((num_rows, k), dtype=torch.int64, device=logits.device)
    log_softmax = torch.empty((num_rows, k), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return token_ids, log_softmax
    best = torch.empty((num_rows, splits, k), dtype=torch.int64, device=logits.device)
    sums = torch.empty((num_rows, splits), dtype=torch.float32, device=logits.device)
    largest, thresholds, columns = best, sums, (best, best, sums)
    filters, width = None if draws is None else draws.filters, triton.next_power_of_2(splits)
    ids, is_mapped = token_ids if logit_ids is None else logit_ids, logit_ids is not None
    if draws is not None:
        columns = draws[:3]
        if filters is not None and filters.top_k is not None:
            thresholds, largest, _ = search_rows(logits, draws.temperatures, filters)
        else:
            thresholds = draws.temperatures if filters is None else filters.log_min_p
            largest = part_maxima(logits, _TOPK_SPLIT_SIZE)
    num_parts = largest.numel() // num_rows
    _perturbed_topk_kernel[num_rows, splits](
        logits, largest, best, sums, *columns, thresholds, ids, logits.stride(0), num_logits, splits, num_parts,
        K=k, RANDOM=draws is not None, FILTERED=filters is not None, MAPPED=is_mapped, BLOCK=_TOPK_SPLIT_SIZE,
        PARTS=triton.next_power_of_2(num_parts), enable_fp_fusion=False,
    )  # fmt: skip
    _choose_topk_kernel[(num_rows,)](
        best, sums, token_ids, log_softmax, ids, num_logits, splits,
        K=k, SPLITS=width, CANDIDATES=triton.next_power_of_2(splits * k), MAPPED=is_mapped,
    )  # fmt: skip
    return token_ids, log_softmax


def _check(logits: Tensor, draws: Draws | None, logit_ids: Tensor | None) -> None:
    assert logits.ndim == 2 and logits.shape[1] > 0 and logits.stride(1) == 1, (logits.shape, logits.stride())
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), logits.dtype
    if logit_ids is not None:
        check_token_ids(logits, logit_ids)
    if draws is not None:
        check_columns(len(logits), draws.seeds, draws.positions)
        temperatures = draws.temperatures
        assert temperatures.shape == (len(logits),) and temperatures.dtype is torch.float32, temperatures
        assert temperatures.is_contiguous(), temperatures.stride()


@triton.jit
def _perturbed(logits, maximum, temperature, seed, position, ids, threshold, FILTERED: tl.constexpr):
    """Return (logits - max) / temperature + noise of the token `ids`, rounded at each step as torch rounds; -inf below
    the threshold if FILTERED."""
    scores = scores_of(logits, maximum, temperature)
    perturbed = scores + gumbel_from_bits_of(random_bits(seed, position, ids))
    if FILTERED:
        perturbed = tl.where(scores < threshold, -float("inf"), perturbed)
    return perturbed


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _perturbed_max_kernel(
    logits_ptr,  # [num_rows, num_logits]
    largest_ptr,  # [num_rows, num_parts] int64 packed logits
    best_ptr,  # [num_rows, num_parts] int64 packed scores, written; without noise the row's largest logit
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    thresholds_ptr,  # [num_rows] float32, read if FILTERED
    logit_ids_ptr,  # [num_logits] int32, read if MAPPED
    stride,
    num_logits,
    num_parts,
    FILTERED: tl.constexpr,
    MAPPED: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid: (num_rows, num_parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, at = tl.load(temperatures_ptr + row), row * num_parts + part
    largest = row_max(largest_ptr, row, num_parts, PARTS)
    best, maximum = largest, score_of(largest)
    if (temperature != 0.0) & has_maximum(largest):
        index = part * PART + tl.arange(0, PART)
        logits = tl.load(logits_ptr + row * stride + index, mask=index < num_logits, other=-float("inf")).to(tl.float32)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        threshold, ids = tl.load(thresholds_ptr + row), ids_at(index, num_logits, logit_ids_ptr, MAPPED)
        perturbed = _perturbed(logits, maximum, temperature, seed, position, ids, threshold, FILTERED)
        best = tl.max(tl.where(index < num_logits, pack(perturbed, index), LOWEST), axis=0)
    tl.store(best_ptr + at, best)


@triton.jit
def _choose_kernel(
    largest_ptr,  # [num_rows, num_parts] int64 packed logits
    best_ptr,  # [num_rows, num_parts] int64 packed scores
    token_ids_ptr,  # [num_rows] int64, written
    is_valid_ptr,  # [num_rows] bool, written
    logit_ids_ptr,  # [num_logits] int32, read if MAPPED
    num_logits,
    num_parts,
    MAPPED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid: (num_rows)."""
    row = tl.program_id(0)
    maximum = score_of(row_max(largest_ptr, row, num_parts, PARTS))  # NaN when a logit is
    index = id_of(row_max(best_ptr, row, num_parts, PARTS))
    tl.store(token_ids_ptr + row, ids_at(index, num_logits, logit_ids_ptr, MAPPED))
    tl.store(is_valid_ptr + row, maximum == maximum)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _perturbed_topk_kernel(
    logits_ptr,  # [num_rows, num_logits]
    largest_ptr,  # [num_rows, num_parts] int64 packed logits, read if RANDOM
    best_ptr,  # [num_rows, splits, K] int64 packed scores
    sums_ptr,  # [num_rows, splits] float32, sum of exp(score - the split's best)
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    thresholds_ptr,  # [num_rows] float32, read if FILTERED
    logit_ids_ptr,  # [num_logits] int32, read if MAPPED
    stride,
    num_logits,
    splits,
    num_parts,
    K: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid: (num_rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = split * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + row * stride + index, mask=index < num_logits, other=-float("inf")).to(tl.float32)
    if RANDOM:
        temperature = tl.load(temperatures_ptr + row)
        if temperature != 0.0:
            maximum = score_of(row_max(largest_ptr, row, num_parts, PARTS))
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            threshold, ids = tl.load(thresholds_ptr + row), ids_at(index, num_logits, logit_ids_ptr, MAPPED)
            scores = _perturbed(scores, maximum, temperature, seed, position, ids, threshold, FILTERED)
    at = row * splits + split
    packed = tl.where(index < num_logits, pack(scores, index), LOWEST)
    best = tl.max(packed, axis=0)
    top = score_of(best)
    weights = tl.where(scores == top, 1.0, tl.exp(scores - top))  # also where all are -inf
    tl.store(sums_ptr + at, tl.sum(tl.where(index < num_logits, weights, 0.0), axis=0))
    for rank in range(K):
        tl.store(best_ptr + at * K + rank, best)
        packed = tl.where(packed == best, LOWEST, packed)
        best = tl.max(packed, axis=0)


@triton.jit
def _choose_topk_kernel(
    best_ptr,  # [num_rows, splits, K] int64
    sums_ptr,  # [num_rows, splits] float32
    token_ids_ptr,  # [num_rows, K] int64
    log_softmax_ptr,  # [num_rows, K] float32
    logit_ids_ptr,  # [num_logits] int32, read if MAPPED
    num_logits,
    splits,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Grid: (num_rows)."""
    row = tl.program_id(0).to(tl.int64)
    split, candidate = tl.arange(0, SPLITS), tl.arange(0, CANDIDATES)
    tops = score_of(tl.load(best_ptr + (row * splits + split) * K, mask=split < splits, other=LOWEST))
    tops = tl.where(split < splits, tops, -float("inf"))
    sums = tl.load(sums_ptr + row * splits + split, mask=split < splits, other=0.0)
    packed = tl.load(best_ptr + row * splits * K + candidate, mask=candidate < splits * K, other=LOWEST)
    best = tl.max(packed, axis=0)
    top = score_of(best)
    total = tl.log(tl.sum(tl.where(tops == top, sums, sums * tl.exp(tops - top)), axis=0))
    for rank in range(K):
        tl.store(token_ids_ptr + row * K + rank, ids_at(id_of(best), num_logits, logit_ids_ptr, MAPPED))
        tl.store(log_softmax_ptr + row * K + rank, score_of(best) - top - total)
        packed = tl.where(packed == best, LOWEST, packed)
        best = tl.max(packed, axis=0)


def best_of_share(logits: Tensor, first_id: int, num_ids: int) -> Tensor:
    """Return `best_of_share_ref`, with a packed number of each part of a row."""
    return part_maxima(logits, first_id=first_id, num_ids=num_ids)


def best_of_all(packed: Tensor) -> Choice:
    """Return `best_of_all_ref`."""
    assert packed.dtype == torch.int64 and packed.is_contiguous(), (packed.shape, packed.dtype, packed.stride())
    return choose(packed, packed)
