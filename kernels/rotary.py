"""Rotary position embedding: (a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of every head."""

from __future__ import annotations

import torch

from . import gpu


def rotary_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The specification. `x` [num_tokens, num_heads, head_dim]; `cos`, `sin` [num_tokens, 1, head_dim], where the first
    half of `sin` is negated already."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((b, a), dim=-1) * sin


def turns_ref(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `cos` and `sin`: `positions` [num_tokens] int64, `frequencies` [2, head_dim] float32, of
    cosines and of sines, the first half of these negated; both are multiplied by `scale`."""
    angles = positions.to(torch.float32).view(-1, 1, 1)
    cos, sin = (angles * frequencies[0]).cos_(), (angles * frequencies[1]).sin_()
    if scale != 1.0:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return cos.to(dtype), sin.to(dtype)


def turns(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`turns_ref`, in one launch on CUDA."""
    if gpu.compiled(positions):
        from . import triton_rotary

        return triton_rotary.turns(positions, frequencies, scale, dtype)
    return turns_ref(positions, frequencies, scale, dtype)


def apply_rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotary_ref` in place; `x` may be a strided view. Returns x."""
    assert cos.shape == sin.shape == (x.shape[0], 1, x.shape[2]), (x.shape, cos.shape, sin.shape)
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)
