"""Rotary position embedding: (a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of every head."""

from __future__ import annotations

import torch

from ..operations import Operation


def rotary_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rotated heads `x` [num_tokens, num_heads, head_dim], a new tensor.

    `cos` and `sin` are [num_tokens, 1, head_dim]; the first half of `sin` is negated already."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((b, a), dim=-1) * sin


def turns_ref(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each [num_tokens, 1, head_dim], of `positions` [num_tokens] int64, multiplied by `scale`.

    `frequencies` [2, head_dim] float32 are those of the cosines and of the sines; the first half of the sines' is
    negated, so that `sin` is signed."""
    angles = positions.to(torch.float32).view(-1, 1, 1)
    cos, sin = (angles * frequencies[0]).cos_(), (angles * frequencies[1]).sin_()
    if scale != 1.0:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return cos.to(dtype), sin.to(dtype)


turns = Operation("turns", turns_ref)


def apply_rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` in place as `rotary_ref` does, and return it; `x` may be a strided view."""
    assert cos.shape == sin.shape == (x.shape[0], 1, x.shape[2]), (x.shape, cos.shape, sin.shape)
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)
