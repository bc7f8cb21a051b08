"""The operations of noise.py on a CPU, with the reference's bits, in blocks of a row that stay in cache.

No `fastmath` flag is set, so LLVM neither fuses multiplications with additions nor reorders them. It still vectorises,
because the noise of a token id does not depend on other ids. Numba widens results of 32-bit operations to 64 bits. Each
is cast back at once, and LLVM makes 32-bit instructions of both.

The constants repeat those of noise.py, because numba's cache on disk notices changes of this file only. Tests compare
the results bit for bit.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..numba_kernels import compiled
from .noise import check_scores

_EXACT: set[str] = set()  # no liberties with floating point
_NO_IDS = np.empty(0, np.int32)

_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8 = (
    np.float32(coefficient)
    for coefficient in (
        1.0,
        0.49999281764030457,
        0.33370256423950195,
        0.24277445673942566,
        0.26985013484954834,
        -0.20453974604606628,
        1.2600104808807373,
        -1.6986658573150635,
        1.4425228834152222,
    )
)
_LN_2_PER_EXPONENT = np.float32(0.6931471824645996 * 2.0**-23)
_UNIT = np.float32(2.0**-32)
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_BLOCK_SIZE = 512  # elements per block; a multiple of four vectors

_MULTIPLIER_1, _MULTIPLIER_2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_SALT_1, _SALT_2 = np.uint32(0x243F6A88), np.uint32(0x13198A2E)
_WEIGHT_1, _WEIGHT_2 = np.uint32(0x3C6EF372), np.uint32(0x1B873593)

_EXPONENT_MASK = np.int32(~0x007FFFFF)  # of a float32, and its sign
_HALF_BITS = np.int32(0x3F000000)  # 0.5 as float32 bits


def add_gumbel_noise_(scores: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Add noise to `scores` as `add_gumbel_noise_ref_` does, bit for bit, and return `scores`."""
    check_scores(scores, seeds, positions, token_ids)
    ids, has_ids = (_NO_IDS, False) if token_ids is None else (token_ids.numpy(), True)
    _add_noise(scores.numpy(), seeds.contiguous().numpy(), positions.contiguous().numpy(), ids, has_ids)
    return scores


@compiled(_EXACT)
def _add_noise(scores, seeds, positions, ids, has_ids):
    """Add noise to `scores` [num_rows, num_scores] float32; `seeds`, `positions` [num_rows] int64. `ids` [num_scores]
    int32 are read if `has_ids`."""
    bits, f, k = _scratch()
    for row in range(scores.shape[0]):
        key_1, key_2 = _row_keys(seeds[row], positions[row])
        for start in range(0, scores.shape[1], _BLOCK_SIZE):
            block = scores[row, start : start + _BLOCK_SIZE]
            if has_ids:
                for i in range(block.shape[0]):
                    bits[i] = _mix(np.uint32(np.uint32(ids[start + i]) ^ key_1), key_2)
            else:
                for i in range(bits.shape[0]):
                    bits[i] = _mix(np.uint32(np.uint32(start + i) ^ key_1), key_2)
            _gumbel(bits, f, k)
            for i in range(block.shape[0]):
                block[i] += f[i]


@compiled(_EXACT)
def gumbel_from_bits(r, noise):
    """Write `gumbel_from_bits_ref` of `r` [count] int32 to `noise` [count] float32. For tests."""
    bits, f, k = _scratch()
    for start in range(0, r.shape[0], _BLOCK_SIZE):
        block = r[start : start + _BLOCK_SIZE]
        for i in range(block.shape[0]):
            bits[i] = np.uint32(block[i])
        _gumbel(bits, f, k)
        noise[start : start + _BLOCK_SIZE] = f[: block.shape[0]]


@compiled(_EXACT)
def _scratch():
    """Return arrays for `_gumbel`: bits [_BLOCK_SIZE] uint32, f and k [_BLOCK_SIZE] float32."""
    return np.zeros(_BLOCK_SIZE, np.uint32), np.empty(_BLOCK_SIZE, np.float32), np.empty(_BLOCK_SIZE, np.float32)


@compiled(_EXACT)
def _row_keys(seed, position):
    """Return the two uint32 keys of a row, as the reference's `_row_keys` does."""
    low, high, offset = np.uint32(seed), np.uint32(seed >> 32), np.uint32(position)
    nothing = np.uint32(0)
    key_1 = _mix(np.uint32(np.uint32(low + np.uint32(high * _WEIGHT_1)) ^ _SALT_1), nothing)
    key_2 = _mix(np.uint32(np.uint32(high + np.uint32(low * _WEIGHT_2)) ^ _SALT_2), nothing)
    return _mix(np.uint32(key_1 ^ offset), nothing), _mix(np.uint32(key_2 + offset), nothing)


@compiled(_EXACT)
def _mix(x, key):
    """Mix uint32 as the reference does."""
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * _MULTIPLIER_1)
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(15))) + key)
    x = np.uint32(x * _MULTIPLIER_2)
    return np.uint32(x ^ (x >> np.uint32(16)))


@compiled(_EXACT)
def _gumbel(bits, f, k):
    """Write -log(-log1p(-u)) of `bits` to `f`; `k` is scratch. noise.py derives both logarithms."""
    for i in range(bits.shape[0]):
        is_upper = np.int32(bits[i]) < 0
        s = np.int32(~bits[i] if is_upper else bits[i])
        low = np.int32(s & np.int32(0xFF))
        v = (np.float32(np.int32(s ^ low)) + (np.float32(low) + _HALF)) * _UNIT
        f_upper, k_upper = _split(v)
        f[i] = f_upper if is_upper else v
        k[i] = k_upper if is_upper else _ZERO
    _logarithm(f, k)
    for i in range(f.shape[0]):
        f[i], k[i] = _split(f[i])
    _logarithm(f, k)


@compiled(_EXACT)
def _split(x):
    """Return (1 - m, k * ln 2) of x = m * 2^k, m in [0.5, 1)."""
    bits = np.float32(x).view(np.int32)
    k = np.int32(np.int32(bits - _HALF_BITS) & _EXPONENT_MASK)
    return _ONE - np.int32(bits - k).view(np.float32), np.float32(k) * _LN_2_PER_EXPONENT


@compiled(_EXACT)
def _logarithm(f, k):
    """Compute f = Q(f) - k in place. Four polynomials run side by side, because each operation of one polynomial waits
    for the operation before it."""
    quarter = f.shape[0] // 4
    a, b, c, d = f[:quarter], f[quarter : 2 * quarter], f[2 * quarter : 3 * quarter], f[3 * quarter :]
    for i in range(quarter):
        x = a[i], b[i], c[i], d[i]
        p = x[0] * _C8, x[1] * _C8, x[2] * _C8, x[3] * _C8
        p = _horner_step(p, _C7, x)
        p = _horner_step(p, _C6, x)
        p = _horner_step(p, _C5, x)
        p = _horner_step(p, _C4, x)
        p = _horner_step(p, _C3, x)
        p = _horner_step(p, _C2, x)
        p = _horner_step(p, _C1, x)
        a[i], b[i], c[i], d[i] = _horner_step(p, _C0, x)
    for i in range(f.shape[0]):
        f[i] -= k[i]


@compiled(_EXACT)
def _horner_step(p, coefficient, x):
    """Return (p + coefficient) * x of four numbers each."""
    p = p[0] + coefficient, p[1] + coefficient, p[2] + coefficient, p[3] + coefficient
    return p[0] * x[0], p[1] * x[1], p[2] * x[2], p[3] * x[3]
