"""Scores packed with their ids: one int64 whose order is that of (score, then lower id).

NaN is above all scores, as in torch's argmax, and 0 equals -0. So a maximum is exact in any order, and does not depend
on how a row is split. `key_of` alone gives the order of scores without NaN.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))  # below every packed score
_NAN_KEY = tl.constexpr(2**31 - 1)


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
def row_max(largest_ptr, row, splits, SPLITS: tl.constexpr):
    """Return the packed maximum of a row's splits; `largest` [num_rows, splits]."""
    split = tl.arange(0, SPLITS)
    return tl.max(tl.load(largest_ptr + row.to(tl.int64) * splits + split, mask=split < splits, other=LOWEST), axis=0)
