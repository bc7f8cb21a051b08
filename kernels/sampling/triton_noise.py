"""The noise of noise.py on a GPU, with the reference's bits.

The kernels do the same IEEE operations in the same order on 32-bit numbers. Every kernel that uses these functions is
launched with `enable_fp_fusion=False`: each multiplication and addition becomes a PTX instruction that rounds by itself
(mul.rn, add.rn), which no later pass fuses.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import (
    _HALF_BITS,
    _LN_2_PER_EXPONENT,
    _LOG1P_COEFFICIENTS,
    _MANTISSA_MASK,
    _MULTIPLIER_1,
    _MULTIPLIER_2,
    _SALT_1,
    _SALT_2,
    _WEIGHT_1,
    _WEIGHT_2,
    check_scores,
)

_BLOCK = 1024  # ids per program

_C = [tl.constexpr(coefficient) for coefficient in _LOG1P_COEFFICIENTS]
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8 = _C
_UNIT = tl.constexpr(2.0**-32)
_LN_2 = tl.constexpr(_LN_2_PER_EXPONENT)
_HALF = tl.constexpr(_HALF_BITS)
_EXPONENT_MASK = tl.constexpr(~_MANTISSA_MASK)
_M1, _M2 = tl.constexpr(_MULTIPLIER_1), tl.constexpr(_MULTIPLIER_2 + (1 << 32))
_BOUND_MARGIN = tl.constexpr(1e-3)  # far above the errors of a device's logarithm and of rounding
_S1, _S2 = tl.constexpr(_SALT_1), tl.constexpr(_SALT_2)
_W1, _W2 = tl.constexpr(_WEIGHT_1), tl.constexpr(_WEIGHT_2)


def add_gumbel_noise_(scores: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Add noise to `scores` as `add_gumbel_noise_ref_` does, and return it. `seeds` and `positions` are contiguous."""
    check_scores(scores, seeds, positions, token_ids)
    num_rows, num_scores = scores.shape
    check_columns(num_rows, seeds, positions)
    if scores.numel():
        _perturb_kernel[num_rows, triton.cdiv(num_scores, _BLOCK)](
            scores, seeds, positions, seeds if token_ids is None else token_ids, num_scores,
            MAPPED=token_ids is not None, BLOCK=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return scores


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Return `gumbel_from_bits_ref` of `bits` [count] int32: [count] float32. For tests."""
    assert bits.ndim == 1 and bits.dtype is torch.int32 and bits.is_contiguous(), (bits.shape, bits.dtype)
    out = torch.empty_like(bits, dtype=torch.float32)
    grid = (triton.cdiv(bits.numel(), _BLOCK),)
    _gumbel_kernel[grid](bits, out, bits.numel(), BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


def check_columns(num_rows: int, seeds: Tensor, positions: Tensor) -> None:
    """Assert that seeds and positions are contiguous [num_rows] int64."""
    assert seeds.dtype == positions.dtype == torch.int64, (seeds.dtype, positions.dtype)
    assert seeds.shape == positions.shape == (num_rows,), (seeds.shape, positions.shape, num_rows)
    assert seeds.is_contiguous() and positions.is_contiguous(), (seeds.stride(), positions.stride())


@triton.jit
def _mix(x, key):
    """Mix uint32 as `noise._mix` does, with products and sums that wrap; `key` is added half way."""
    x = (x ^ (x >> 16)) * _M1
    x = (x ^ (x >> 15)) + key
    x = x * _M2
    return x ^ (x >> 16)


@triton.jit
def random_bits(seed, position, ids):
    """Return `random_bits_ref` of the scalars seed and position, int64, and of `ids` int32: int32 bits."""
    low, high, offset = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32)
    zero = low ^ low
    key_1 = _mix((low + high * _W1) ^ _S1, zero)
    key_2 = _mix((high + low * _W2) ^ _S2, zero)
    key_1, key_2 = _mix(key_1 ^ offset, zero), _mix(key_2 + offset, zero)
    return _mix(ids.to(tl.uint32) ^ key_1, key_2).to(tl.int32, bitcast=True)


@triton.jit
def _log1p_negated(f):
    """Return Q(f) by Horner, additions and multiplications apart."""
    q = f * _C8
    q = (q + _C7) * f
    q = (q + _C6) * f
    q = (q + _C5) * f
    q = (q + _C4) * f
    q = (q + _C3) * f
    q = (q + _C2) * f
    q = (q + _C1) * f
    return (q + _C0) * f


@triton.jit
def _split_float(x):
    """Return (1 - m, k * ln 2) of x = m * 2^k, m in [0.5, 1)."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - _HALF) & _EXPONENT_MASK
    return 1.0 - (bits - k).to(tl.float32, bitcast=True), k.to(tl.float32) * _LN_2


@triton.jit
def gumbel_from_bits_of(bits):
    """Return the noise of int32 bits, float32."""
    is_upper = bits < 0
    s = tl.where(is_upper, ~bits, bits)
    low = s & 0xFF
    v = ((s ^ low).to(tl.float32) + (low.to(tl.float32) + 0.5)) * _UNIT
    f_upper, k_upper = _split_float(v)
    x = _log1p_negated(tl.where(is_upper, f_upper, v)) - tl.where(is_upper, k_upper, 0.0)
    f, k = _split_float(x)
    return _log1p_negated(f) - k


@triton.jit
def noise_bound_of(bits):
    """Return a bound of the noise of int32 bits, float32: not below it, and hardly above where the noise is high."""
    return -tl.log((bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * _UNIT) + _BOUND_MARGIN


@triton.jit
def _gumbel_kernel(
    bits_ptr,  # [count] int32
    out_ptr,  # [count] float32, written
    count,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(count / BLOCK),)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < count, other=0)
    tl.store(out_ptr + at, gumbel_from_bits_of(bits), mask=at < count)


@triton.jit
def ids_at(index, count, token_ids_ptr, MAPPED: tl.constexpr):
    """Return the token ids of the columns `index`, int32: equal to it, or read of `token_ids` [count] int32 if
    MAPPED."""
    ids = index
    if MAPPED:
        ids = tl.load(token_ids_ptr + index, mask=index < count, other=0)
    return ids


@triton.jit
def _perturb_kernel(
    scores_ptr,  # [num_rows, num_scores] float32, written
    seeds_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int64
    token_ids_ptr,  # [num_scores] int32, read if MAPPED
    num_scores,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows, ceil(num_scores / BLOCK))."""
    row = tl.program_id(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = scores_ptr + row.to(tl.int64) * num_scores + index
    scores, ids = tl.load(at, mask=index < num_scores, other=0.0), ids_at(index, num_scores, token_ids_ptr, MAPPED)
    noise = gumbel_from_bits_of(random_bits(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids))
    tl.store(at, scores + noise, mask=index < num_scores)
