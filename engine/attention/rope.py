"""Rotary position embeddings: the frequencies of a checkpoint, and their cosines and sines.

The pair (i, i + head_dim / 2) of a head at position p is rotated by the angle p * inv_freq[i]. The scaling variants
change `inv_freq`, and yarn also scales the result: default and linear (RoFormer, arXiv:2104.09864), yarn
(arXiv:2309.00071), llama3 (as published with Llama 3.1). None depends on the length of a sequence.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ...kernels.products.rotary import turns
from ..checkpoint.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the radians per position of each pair: [head_dim / 2] float32 on the CPU."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.rope_type:
        case "default":
            return inv_freq
        case "linear":
            return inv_freq / rope.factor
        case "llama3":
            return _llama3(rope, inv_freq)
        case "yarn":
            return _yarn(rope, inv_freq, head_dim)


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """Return the order of a head's rows in which all pairs are (i, i + head_dim / 2), if only the first `rotary_dim`
    rows are rotated, as pairs (i, i + rotary_dim / 2). The others become pairs of a frequency of 0."""
    half, rest = rotary_dim // 2, list(range(rotary_dim, head_dim))
    num_first = head_dim // 2 - half
    return [*range(half), *rest[:num_first], *range(half, rotary_dim), *rest[num_first:]]


class RotaryEmbedding:
    """Makes cosines and sines for given positions. It holds the frequencies only, no table per context length."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device, rotary_dim: int | None = None) -> None:
        """`rotary_dim`: numbers of a head that are rotated, whose rows are in `rotary_order`; None: all."""
        inv_freq = inverse_frequencies(rope, rotary_dim or head_dim)
        inv_freq = F.pad(inv_freq, (0, head_dim // 2 - len(inv_freq)))
        cos_freq, sin_freq = torch.cat((inv_freq, inv_freq)), torch.cat((-inv_freq, inv_freq))  # sin(-a) = -sin(a)
        self._frequencies = torch.stack((cos_freq, sin_freq)).to(device)  # [2, head_dim] float32
        self._scale = rope.attention_factor

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines of `positions` [num_tokens] int64, each [num_tokens, 1, head_dim] of `dtype`:
        the arguments of `kernels.rotary.apply_rotary_`."""
        return turns(positions, self._frequencies, self._scale, dtype)


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    rotations = rope.original_context_len * inv_freq / (2 * math.pi)  # over the original context
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * inv_freq + (1 - kept) * inv_freq / rope.factor


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_context_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return stretched * inv_freq / rope.factor + (1 - stretched) * inv_freq
