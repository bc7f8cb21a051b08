"""Queries and the stored row of attention to latents (MLA, arXiv:2405.04434), side by side in one tensor of heads.

    head h < num_heads    absorbed[h] | in_halves(rotary[h])
    the last head         norm(c) | in_halves(r)                   for c | r = stored

Rotation (rotary.py) turns pairs of numbers that lie in the two halves of what it rotates. Checkpoints have such pairs
side by side, and `in_halves` moves them.
"""

from __future__ import annotations

import torch

from .norm import Norm, rms_norm
from .operations import Operation


def join_latents_ref(
    absorbed: torch.Tensor, rotary: torch.Tensor, stored: torch.Tensor, norm: Norm, *, is_interleaved: bool
) -> torch.Tensor:
    """Return the heads before rotation, a new tensor [num_tokens, num_heads + 1, rank + rotary_dim].

    `absorbed` [num_tokens, num_heads, rank], `rotary` [num_tokens, num_heads, rotary_dim] and `stored` [num_tokens,
    rank + rotary_dim] may be views. If `is_interleaved`, numbers that are rotated together lie side by side."""
    num_tokens, num_heads, rank = absorbed.shape
    assert rotary.shape[:2] == absorbed.shape[:2] and stored.shape == (num_tokens, rank + rotary.shape[2]), stored.shape
    heads = absorbed.new_empty(num_tokens, num_heads + 1, stored.shape[1])
    heads[:, :-1, :rank] = absorbed
    heads[:, :-1, rank:] = _in_halves(rotary) if is_interleaved else rotary
    heads[:, -1, :rank] = rms_norm(stored[:, :rank], *norm)
    heads[:, -1, rank:] = _in_halves(stored[:, rank:]) if is_interleaved else stored[:, rank:]
    return heads


def _in_halves(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [..., rotary_dim] with its numbers 0, 2, 4 .. before the others."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


join_latents = Operation("join_latents", join_latents_ref)
