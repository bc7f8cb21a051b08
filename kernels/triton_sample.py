"""The operations of kernels/sample.py on a GPU: a row is split over the vocabulary, and nothing is read on the host.

The noise has the bits of kernels/noise.py: the same IEEE operations in the same order, compiled without fusion of
multiplications into additions. Differences and divisions round as torch's do.

A score and its id are packed into one int64 whose order is that of (score, then lower id). NaN is above all scores, as
in torch's argmax. So a maximum is exact in any order, and a row's token does not depend on how a row is split. There
are three launches. `_row_max_kernel` finds the maximum of each split of a row, the second kernel the best scores of
each split, the third the best of the splits. If all rows are greedy, one launch is left out.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sample import Choice
from .triton_noise import check_columns, gumbel_from_bits_of, random_bits

MAX_TOPK = 16
_SPLIT_SIZE = 1024  # ids of a program
_TOPK_SPLIT_SIZE = 2048
LOWEST = tl.constexpr(-(2**63))  # below every packed score
_NAN_KEY = tl.constexpr(2**31 - 1)


class Noise(NamedTuple):
    """The columns that rows are drawn with."""

    seeds: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    temperatures: Tensor  # [num_rows] float32, 0: greedy


def perturbed_argmax(
    logits: Tensor, seeds: Tensor | None = None, positions: Tensor | None = None, temperatures: Tensor | None = None
) -> Choice:
    """Return `perturbed_argmax_ref`."""
    noise = _checked(logits, seeds, positions, temperatures)
    num_rows, vocab_size = logits.shape
    splits = triton.cdiv(vocab_size, _SPLIT_SIZE)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_valid = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return Choice(token_ids, is_valid)
    largest = torch.empty((num_rows, splits), dtype=torch.int64, device=logits.device)
    best = largest if noise is None else torch.empty_like(largest)
    grid, width = (num_rows, splits), triton.next_power_of_2(splits)
    _row_max_kernel[grid](logits, largest, logits.stride(0), vocab_size, BLOCK=_SPLIT_SIZE)
    if noise is not None:
        _perturbed_max_kernel[grid](
            logits, largest, best, *noise, logits.stride(0), vocab_size, splits,
            BLOCK=_SPLIT_SIZE, SPLITS=width, enable_fp_fusion=False,
        )  # fmt: skip
    _choose_kernel[(num_rows,)](largest, best, token_ids, is_valid, splits, SPLITS=width)
    return Choice(token_ids, is_valid)


def serves_topk(logits: Tensor, k: int, *_: object, **__: object) -> bool:
    """Return whether `perturbed_topk` finds so many, of any logits."""
    del logits
    return k <= MAX_TOPK


def perturbed_topk(
    logits: Tensor,
    k: int,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    temperatures: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `perturbed_topk_ref`; `k` is at most MAX_TOPK and the size of the vocabulary."""
    noise = _checked(logits, seeds, positions, temperatures)
    num_rows, vocab_size = logits.shape
    assert 1 <= k <= min(MAX_TOPK, vocab_size), (k, vocab_size)
    splits = triton.cdiv(vocab_size, _TOPK_SPLIT_SIZE)
    token_ids = torch.empty((num_rows, k), dtype=torch.int64, device=logits.device)
    log_softmax = torch.empty((num_rows, k), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return token_ids, log_softmax
    best = torch.empty((num_rows, splits, k), dtype=torch.int64, device=logits.device)
    sums = torch.empty((num_rows, splits), dtype=torch.float32, device=logits.device)
    largest = sums.new_empty(sums.shape, dtype=torch.int64)
    grid, width = (num_rows, splits), triton.next_power_of_2(splits)
    if noise is not None:
        _row_max_kernel[grid](logits, largest, logits.stride(0), vocab_size, BLOCK=_TOPK_SPLIT_SIZE)
    _perturbed_topk_kernel[grid](
        logits, largest, best, sums, *(noise or (best, best, sums)), logits.stride(0), vocab_size, splits,
        K=k, RANDOM=noise is not None, BLOCK=_TOPK_SPLIT_SIZE, SPLITS=width, enable_fp_fusion=False,
    )  # fmt: skip
    _choose_topk_kernel[(num_rows,)](
        best, sums, token_ids, log_softmax, splits, K=k, SPLITS=width, CANDIDATES=triton.next_power_of_2(splits * k)
    )
    return token_ids, log_softmax


def _checked(
    logits: Tensor, seeds: Tensor | None, positions: Tensor | None, temperatures: Tensor | None
) -> Noise | None:
    assert logits.ndim == 2 and logits.shape[1] > 0 and logits.stride(1) == 1, (logits.shape, logits.stride())
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), logits.dtype
    if seeds is None or positions is None or temperatures is None:
        assert seeds is positions is temperatures is None, "seeds, positions and temperatures come together"
        return None
    check_columns(len(logits), seeds, positions)
    assert temperatures.shape == seeds.shape and temperatures.dtype is torch.float32, temperatures
    assert temperatures.is_contiguous(), temperatures.stride()
    return Noise(seeds, positions, temperatures)


@triton.jit
def pack(score, ids):
    """Return an int64 that is larger for a larger score (float32), then for a lower id (int32). NaN is above all; 0 and
    -0 are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(score == score, key, _NAN_KEY)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def id_of(packed):
    """Return the id of a packed score, int64."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def score_of(packed):
    """Return the score of a packed score, float32."""
    key = (packed >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _row_max(largest_ptr, row, splits, SPLITS: tl.constexpr):
    """Return the packed maximum of a row's splits; `largest` [num_rows, splits]."""
    split = tl.arange(0, SPLITS)
    return tl.max(tl.load(largest_ptr + row.to(tl.int64) * splits + split, mask=split < splits, other=LOWEST), axis=0)


@triton.jit
def _perturbed(logits, maximum, temperature, seed, position, ids):
    """Return (logits - max) / temperature + noise, rounded at each step as torch rounds."""
    noise = gumbel_from_bits_of(random_bits(seed, position, ids))
    return tl.div_rn(logits - maximum, tl.zeros_like(logits) + temperature) + noise


@triton.jit
def _row_max_kernel(logits_ptr, largest_ptr, stride, vocab_size, BLOCK: tl.constexpr):
    """Grid: (num_rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = split * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab_size, other=0.0).to(tl.float32)
    packed = tl.where(ids < vocab_size, pack(logits, ids), LOWEST)
    tl.store(largest_ptr + row * tl.num_programs(1) + split, tl.max(packed, axis=0))


@triton.jit
def _perturbed_max_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    largest_ptr,  # [num_rows, splits] int64 packed logits
    best_ptr,  # [num_rows, splits] int64 packed scores
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    stride,
    vocab_size,
    splits,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid: (num_rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    if temperature == 0.0:
        tl.store(best_ptr + row * splits + split, tl.load(largest_ptr + row * splits + split))
    else:
        ids = split * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab_size, other=0.0).to(tl.float32)
        maximum = score_of(_row_max(largest_ptr, row, splits, SPLITS))
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        packed = pack(_perturbed(logits, maximum, temperature, seed, position, ids), ids)
        packed = tl.where(ids < vocab_size, packed, LOWEST)
        tl.store(best_ptr + row * splits + split, tl.max(packed, axis=0))


@triton.jit
def _choose_kernel(largest_ptr, best_ptr, token_ids_ptr, is_valid_ptr, splits, SPLITS: tl.constexpr):
    """Grid: (num_rows)."""
    row = tl.program_id(0)
    maximum = score_of(_row_max(largest_ptr, row, splits, SPLITS))  # NaN when a logit is
    tl.store(token_ids_ptr + row, id_of(_row_max(best_ptr, row, splits, SPLITS)))
    tl.store(is_valid_ptr + row, maximum == maximum)


@triton.jit
def _perturbed_topk_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    largest_ptr,  # [num_rows, splits] int64 packed logits, read where RANDOM
    best_ptr,  # [num_rows, splits, K] int64 packed scores
    sums_ptr,  # [num_rows, splits] float32, sum of exp(score - the split's best)
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    stride,
    vocab_size,
    splits,
    K: tl.constexpr,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid: (num_rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = split * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    if RANDOM:
        temperature = tl.load(temperatures_ptr + row)
        if temperature != 0.0:
            maximum = score_of(_row_max(largest_ptr, row, splits, SPLITS))
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            scores = _perturbed(scores, maximum, temperature, seed, position, ids)
    at = row * splits + split
    packed = tl.where(ids < vocab_size, pack(scores, ids), LOWEST)
    best = tl.max(packed, axis=0)
    top = score_of(best)
    weights = tl.where(scores == top, 1.0, tl.exp(scores - top))  # also where all are -inf
    tl.store(sums_ptr + at, tl.sum(tl.where(ids < vocab_size, weights, 0.0), axis=0))
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
    splits,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
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
        tl.store(token_ids_ptr + row * K + rank, id_of(best))
        tl.store(log_softmax_ptr + row * K + rank, score_of(best) - top - total)
        packed = tl.where(packed == best, LOWEST, packed)
        best = tl.max(packed, axis=0)
