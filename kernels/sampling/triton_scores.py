"""Scores of tokens and their integer weights (filters.py) on a GPU, with the reference's bits.

Kernels that use them are launched with `enable_fp_fusion=False`, as those of triton_noise.py are.
"""

# A launch is no call that a type checker knows.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .filters import EXP2_COEFFICIENTS, LOG2_E, MIN_SCORE, WEIGHT_BITS

_LOG2_E, _MIN_SCORE = tl.constexpr(LOG2_E), tl.constexpr(MIN_SCORE)
_E0, _E1, _E2, _E3, _E4, _E5, _E6 = (tl.constexpr(each) for each in EXP2_COEFFICIENTS)
_SCALE_BIAS = tl.constexpr(127 + WEIGHT_BITS)
_ROUNDER = tl.constexpr(1.5 * 2**23)  # added to a small float32 and subtracted again, it rounds as torch.round does


@triton.jit
def scores_of(logits, maximum, temperature):
    """Return (logits - max) / temperature, rounded at each step as torch rounds."""
    return tl.div_rn(logits - maximum, tl.zeros_like(logits) + temperature)


@triton.jit
def weights_of(scores):
    """Return `filters._weights` of scores at most 0, int64."""
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
    return ((power + _E0) * scale).to(tl.int64)
