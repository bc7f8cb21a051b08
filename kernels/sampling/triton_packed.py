"""Scores packed with their ids: one int64 whose order is that of (score, then lower id).

NaN is above all scores, as in torch's argmax, and 0 equals -0. So a maximum is exact in any order, and does not depend
on how a row is split. `key_of` alone gives the order of scores without NaN.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # logits of a program

LOWEST = tl.constexpr(-(2**63))  # below every packed score
_NAN_KEY = tl.constexpr(2**31 - 1)


def part_maxima(logits: Tensor, part_size: int = _BLOCK, *, first_id: int = 0, num_ids: int | None = None) -> Tensor:
    """Return the largest logit of each part of a row, packed with its id: [num_rows, num_parts] int64.

    Args:
        logits: [num_rows, num_logits] float32, bfloat16 or float16, rows contiguous.
        part_size: logits of a part, a power of two.
        first_id: the id of a row's first logit; the others follow.
        num_ids: logits of a row that count; None: all.
    """
    num_rows, num_logits = logits.shape
    num_parts, block = triton.cdiv(num_logits, part_size), max(_BLOCK, part_size)
    largest = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
    if num_rows:
        _part_maxima_kernel[num_rows, triton.cdiv(num_logits, block)](
            logits, largest, logits.stride(0), num_logits if num_ids is None else num_ids, num_parts, first_id,
            NUM_PARTS=block // part_size, PART=part_size,
        )  # fmt: skip
    return largest


@triton.jit
def _part_maxima_kernel(
    logits_ptr,  # [num_rows, num_logits], rows `stride` apart
    largest_ptr,  # [num_rows, num_parts] int64, written
    stride,
    num_logits,  # that count
    num_parts,
    first_id,
    NUM_PARTS: tl.constexpr,  # of a program
    PART: tl.constexpr,
):
    """Grid: (num_rows, ceil(num_parts / NUM_PARTS))."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1) * NUM_PARTS + tl.arange(0, NUM_PARTS)
    index = part[:, None] * PART + tl.arange(0, PART)[None, :]
    logits = tl.load(logits_ptr + row * stride + index, mask=index < num_logits, other=0.0).to(tl.float32)
    packed = tl.where(index < num_logits, pack(logits, first_id + index), LOWEST)
    tl.store(largest_ptr + row * num_parts + part, tl.max(packed, axis=1), mask=part < num_parts)


@triton.jit
def key_of(score):
    """Return an int32 that is larger for a larger score (float32, no NaN); 0 and -0 have one key."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_of_key(key):
    """Return the score of a key, float32."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def pack(score, ids):
    """Return an int64 that is larger for a larger score (float32), then for a lower id (int32). NaN is above all; 0 and
    -0 are equal."""
    key = tl.where(score == score, key_of(score), _NAN_KEY)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def id_of(packed):
    """Return the id of a packed score, int64."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def score_of(packed):
    """Return the score of a packed score, float32."""
    return score_of_key((packed >> 32).to(tl.int32))


@triton.jit
def row_max(largest_ptr, row, num_parts, PARTS: tl.constexpr):
    """Return the packed maximum of a row's parts; `largest` [num_rows, num_parts]."""
    part = tl.arange(0, PARTS)
    at = largest_ptr + row.to(tl.int64) * num_parts + part
    return tl.max(tl.load(at, mask=part < num_parts, other=LOWEST), axis=0)
