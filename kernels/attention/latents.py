"""Heads of attention to latents (MLA, arXiv:2405.04434) in the two forms that give equal results.

A query of a head is plain | rotary. A token stores the latent norm(c) | rotate(r), where c | r comes from a product.
Keys and values of head h are products of the latent: W_K[h] c | r and W_V[h] c.

    absorbed   queries W_K[h]^T plain | rotate(rotary) attend to the latents themselves, which are keys and values.
               W_V[h] makes a head's value of the attended latent. For few tokens: latents are read as they are stored
    expanded   queries plain | rotate(rotary) attend to keys and values that are made of latents. For prompts: a head
               is narrower than a latent (triton_expanded.py)

Rotation (rotary.py) turns pairs of numbers that lie in the two halves of what it rotates. Checkpoints have such pairs
side by side, and `in_halves` moves them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..operations import Operation, kernel
from ..products.norm import Norm, rms_norm
from .paged_plan import PagedPlan


class Turns(NamedTuple):
    """Values of a forward's tokens that do not depend on the layer."""

    cos: torch.Tensor  # [num_tokens, 1, rope_dim], contiguous
    sin: torch.Tensor  # [num_tokens, 1, rope_dim], contiguous; its first half is negated
    rows: torch.Tensor  # [num_tokens] int64 of `token_rows` (paged_plan.py), where latents are stored


class Keys(NamedTuple):
    """The expanded keys and values of some slots of each sequence, end to end."""

    expanded: torch.Tensor  # [num_keys, num_heads * (plain_dim + value_dim)]
    turned: torch.Tensor  # [num_keys, rope_dim], the part of a key that all heads share; may be strided by key
    starts: torch.Tensor  # [num_seqs + 1] int32, first key of each sequence, and the end
    offsets: torch.Tensor | None  # [num_seqs] int32: token t sees its sequence's first t + offset + 1 keys; None: t + 1


class LatentWeights(NamedTuple):
    """The weights of a layer between its first product and its last one."""

    norm: Norm  # of latents, [rank]
    up: torch.Tensor  # [num_heads, plain_dim + value_dim, rank], contiguous: W_K above W_V
    plain_dim: int
    is_interleaved: bool  # numbers that are rotated together lie side by side

    @property
    def rank(self) -> int:
        """Numbers of a latent without its rotated part."""
        return self.up.shape[2]

    @property
    def key_up(self) -> torch.Tensor:
        """W_K, [num_heads, plain_dim, rank]."""
        return self.up[:, : self.plain_dim]

    @property
    def value_up(self) -> torch.Tensor:
        """W_V transposed, [num_heads, rank, value_dim]."""
        return self.up[:, self.plain_dim :].transpose(1, 2)


def join_latents(q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """Return the absorbed queries and behind them the latent, before rotation: a new tensor [num_tokens, num_heads + 1,
    rank + rope_dim].

    `q` [num_tokens, num_heads, plain_dim + rope_dim] and `stored` [num_tokens, rank + rope_dim] may be views."""
    num_tokens, num_heads, _ = q.shape
    rank, (plain, rotary) = weights.rank, q.tensor_split([weights.plain_dim], dim=2)
    assert stored.shape == (num_tokens, rank + rotary.shape[2]), (q.shape, stored.shape)
    heads = q.new_empty(num_tokens, num_heads + 1, stored.shape[1])
    heads[:, :-1, :rank] = torch.bmm(plain.transpose(0, 1), weights.key_up).transpose(0, 1)
    heads[:, :-1, rank:] = in_halves(rotary) if weights.is_interleaved else rotary
    heads[:, -1, :rank] = rms_norm(stored[:, :rank], *weights.norm)
    heads[:, -1, rank:] = in_halves(stored[:, rank:]) if weights.is_interleaved else stored[:, rank:]
    return heads


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [..., rotary_dim] with its numbers 0, 2, 4 .. before the others."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def latent_values_ref(attended: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """Return the values of attended latents, [num_tokens, num_heads, rank] -> [num_tokens, num_heads * value_dim]."""
    return torch.bmm(attended.transpose(0, 1), weights.value_up).transpose(0, 1).flatten(1)


latent_values = Operation("latent_values", latent_values_ref)


@kernel
def absorb_latents(
    q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights, turns: Turns, kv_layer: torch.Tensor
) -> torch.Tensor: ...


@kernel
def turn_latents(
    q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights, turns: Turns, kv_layer: torch.Tensor
) -> torch.Tensor: ...


@kernel
def latent_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, plan: PagedPlan, rank: int, scale: float
) -> torch.Tensor: ...


@kernel
def expanded_attention(
    q: torch.Tensor,
    keys: Keys,
    starts: torch.Tensor,
    plain_dim: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    tiles: Any = None,
) -> torch.Tensor: ...
