"""The log-probabilities of logprobs.py on a GPU, in two launches and without a copy of the logits.

    1. `_parts_kernel`    the largest logit of each part of a row, and the part's sum of exponentials
    2. `_choose_kernel`   joins the sums of a row, and looks for the top k in the k parts with the largest maxima

No other part has one of the top k: k parts have larger maxima. k is always the same, so that no request waits for a
kernel to be compiled.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logprobs import TopLogprobs
from .triton_packed import LOWEST, id_of, pack, score_of
from .triton_sample import MAX_TOPK

_MOST_PARTS = 512  # of a row
_BLOCK = 1024  # logits of a program


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogprobs:
    """Return `top_logprobs_ref`; values may differ in the last bits."""
    num_rows, num_logits = logits.shape
    k, device = min(MAX_TOPK, num_logits), logits.device
    assert token_ids.shape == (num_rows,) and token_ids.dtype == torch.int64, (token_ids.shape, token_ids.dtype)
    assert logits.stride(1) == 1 and logits.is_floating_point(), (logits.stride(), logits.dtype)
    assert num_top <= k, (num_top, logits.shape)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    top_ids = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    values = torch.empty((num_rows, k), dtype=torch.float32, device=device)
    if num_rows:
        part_size = max(8, triton.next_power_of_2(triton.cdiv(num_logits, _MOST_PARTS)))
        num_parts, block = triton.cdiv(num_logits, part_size), max(_BLOCK, part_size)
        maxima = torch.empty((num_rows, num_parts), dtype=torch.int64, device=device)
        sums = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
        row = (logits, logits.stride(0), num_logits, maxima, sums, num_parts)
        _parts_kernel[num_rows, triton.cdiv(num_logits, block)](*row, NUM_PARTS=block // part_size, PART=part_size)
        _choose_kernel[(num_rows,)](
            *row, token_ids.contiguous(), chosen, top_ids, values,
            K=k, RANKS=triton.next_power_of_2(k), PART=part_size, PARTS=triton.next_power_of_2(num_parts), num_warps=8,
        )  # fmt: skip
    return TopLogprobs(chosen, top_ids[:, :num_top].contiguous(), values[:, :num_top].contiguous())


@triton.jit
def _parts_kernel(
    logits_ptr,  # [num_rows, num_logits], rows `stride` apart
    stride,
    num_logits,
    maxima_ptr,  # [num_rows, num_parts] int64, written: packed largest logits
    sums_ptr,  # [num_rows, num_parts] float32, written: sum of exp(logit - the part's largest)
    num_parts,
    NUM_PARTS: tl.constexpr,  # of a program
    PART: tl.constexpr,
):
    """Grid: (num_rows, ceil(num_parts / NUM_PARTS))."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1) * NUM_PARTS + tl.arange(0, NUM_PARTS)
    index = part[:, None] * PART + tl.arange(0, PART)[None, :]
    is_there = index < num_logits
    logits = tl.load(logits_ptr + row * stride + index, mask=is_there, other=-float("inf")).to(tl.float32)
    largest = tl.max(tl.where(is_there, pack(logits, index), LOWEST), axis=1)
    top = score_of(largest)[:, None]
    weights = tl.where(logits == top, 1.0, tl.exp(logits - top))  # also where all are -inf
    at = row * num_parts + part
    tl.store(maxima_ptr + at, largest, mask=part < num_parts)
    tl.store(sums_ptr + at, tl.sum(tl.where(is_there, weights, 0.0), axis=1), mask=part < num_parts)


@triton.jit
def _choose_kernel(
    logits_ptr,  # as for _parts_kernel, up to num_parts
    stride,
    num_logits,
    maxima_ptr,
    sums_ptr,
    num_parts,
    chosen_ids_ptr,  # [num_rows] int64
    chosen_ptr,  # [num_rows] float32, written
    top_ids_ptr,  # [num_rows, K] int64, written
    values_ptr,  # [num_rows, K] float32, written
    K: tl.constexpr,
    RANKS: tl.constexpr,  # the power of two for K
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # the power of two for num_parts
):
    """Grid: (num_rows,)."""
    row, part, rank = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, RANKS)
    at = row * num_parts + part
    maxima = tl.load(maxima_ptr + at, mask=part < num_parts, other=LOWEST)
    sums = tl.load(sums_ptr + at, mask=part < num_parts, other=0.0)
    best = tl.max(maxima, axis=0)
    top, tops = score_of(best), tl.where(part < num_parts, score_of(maxima), -float("inf"))
    total = tl.log(tl.sum(tl.where(tops == top, sums, sums * tl.exp(tops - top)), axis=0))
    row_ptr = logits_ptr + row * stride
    logit = tl.load(row_ptr + tl.load(chosen_ids_ptr + row)).to(tl.float32)
    tl.store(chosen_ptr + row, logit - top - total)
    likely = tl.full([RANKS], PARTS, tl.int32)  # the K parts with the largest maxima
    for k in range(K):
        largest = tl.max(maxima, axis=0)
        likely = tl.where((rank == k) & (largest != LOWEST), (id_of(largest) // PART).to(tl.int32), likely)
        maxima = tl.where(maxima == largest, LOWEST, maxima)
    index = likely[:, None] * PART + tl.arange(0, PART)[None, :]
    is_there = (likely[:, None] < num_parts) & (index < num_logits)
    logits = tl.load(row_ptr + index, mask=is_there, other=-float("inf")).to(tl.float32)
    packed = tl.reshape(tl.where(is_there, pack(logits, index), LOWEST), [RANKS * PART])
    for k in range(K):
        best = tl.max(packed, axis=0)
        tl.store(top_ids_ptr + row * K + k, id_of(best))
        tl.store(values_ptr + row * K + k, score_of(best) - top - total)
        packed = tl.where(packed == best, LOWEST, packed)
