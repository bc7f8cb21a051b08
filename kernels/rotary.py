"""Rotary position embedding: (a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of every head."""

from __future__ import annotations

import torch


def rotary_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The specification. `x` [num_tokens, num_heads, head_dim]; `cos`, `sin` [num_tokens, 1, head_dim], where the first
    half of `sin` is negated already."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((b, a), dim=-1) * sin


def apply_rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotary_ref` in place; `x` may be a strided view. Returns x."""
    assert cos.shape == sin.shape == (x.shape[0], 1, x.shape[2]), (x.shape, cos.shape, sin.shape)
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)
