"""Interface between a model's layers and the ways to compute attention (attention.py): one context per forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...kernels.attention.latents import LatentWeights, join_latents, latent_values
from .pool_rows import PoolRows

CosSin = tuple[torch.Tensor, torch.Tensor]  # of the batch's tokens, [num_tokens, 1, rotary_dim]; the sine is signed


class HeadNorms(NamedTuple):
    """Weights that norm q and k per head before their rotation."""

    q: torch.Tensor  # [head_dim]
    k: torch.Tensor  # [head_dim]


class LayerHeads(NamedTuple):
    """Arguments of attention that differ between layers."""

    layer: int  # its index in the pool
    norms: HeadNorms | None = None
    window: int | None = None  # positions that a query sees, its own included; None: all
    sinks: torch.Tensor | None = None  # [num_heads] float32, scores of query heads that have no value


class AttentionContext(ABC):
    """State that the attention layers of one forward share: positions, pages, masks, plans of kernels."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        """Attend in a layer: `qkv` [num_tokens, q_size + num_planes * kv_size] -> [num_tokens, q_size].

        `qkv` may be overwritten. On return the new tokens' KV is stored."""

    def attend_latents(self, index: int, q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        """Attend in layer `index` of a pool of latents, and store the new tokens' latents: return the values,
        [num_tokens, num_heads * value_dim].

        `q` [num_tokens, num_heads, plain_dim + rope_dim] and `stored` [num_tokens, rank + rope_dim], the latents before
        their norm, are not rotated yet. They may be views, and may be overwritten."""
        joined = join_latents(q, stored, weights)
        attended = self(joined.flatten(1), LayerHeads(index)).unflatten(1, (q.shape[1], -1))
        return latent_values(attended[..., : weights.rank], weights)

    def pick(self, index: int, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> None:
        """Store the index keys of new tokens in layer `index` of their pool, and choose the tokens that the following
        calls of `attend_latents` see (kernels/attention/picks.py).

        `q` [num_tokens, num_index_heads, index_head_dim] and `k` [num_tokens, index_head_dim] are not rotated yet, and
        may be overwritten. `weights` is [num_tokens, num_index_heads] float32."""
        del index, q, k, weights
        raise AssertionError(f"{type(self).__name__} attends to all tokens")

    @property
    def further(self) -> PoolRows:
        """The rows of the forward's tokens in the pools beside that of KV. A model without such pools has none."""
        raise AssertionError(f"{type(self).__name__}: the model declares no further pools")

    def joined(self, second: AttentionContext, num_first: int) -> AttentionContext:
        """Return the attention of this batch, which has `num_first` tokens, and of another one in one forward."""
        return _MixedAttention(self, second, num_first)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledQueries(AttentionContext):
    """The attention of a family that scales queries by their positions. Rotation is linear, so a query that is not
    rotated yet may be scaled as well as a rotated one."""

    inner: AttentionContext
    scales: torch.Tensor  # [num_tokens, 1], of the model's dtype
    q_size: int

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        qkv[:, : self.q_size].mul_(self.scales)
        return self.inner(qkv, heads)

    def attend_latents(self, index: int, q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        return self.inner.attend_latents(index, q.mul_(self.scales.unsqueeze(2)), stored, weights)

    def joined(self, second: AttentionContext, num_first: int) -> AttentionContext:
        assert isinstance(second, ScaledQueries), second
        scales = torch.cat([self.scales, second.scales])
        return ScaledQueries(self.inner.joined(second.inner, num_first), scales, self.q_size)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionByWindow(AttentionContext):
    """The attention of a family whose layers with a window differ from the others. Each kind has a context."""

    unbounded: AttentionContext  # of layers that see all positions
    windowed: AttentionContext

    @property
    def further(self) -> PoolRows:
        return self.unbounded.further

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        return (self.unbounded if heads.window is None else self.windowed)(qkv, heads)


@dataclass(frozen=True, slots=True, eq=False)
class FurtherPools(AttentionContext):
    """The attention of a model that has pools beside that of KV."""

    inner: AttentionContext
    rows: PoolRows

    @property
    def further(self) -> PoolRows:
        return self.rows

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        return self.inner(qkv, heads)

    def attend_latents(self, index: int, q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        return self.inner.attend_latents(index, q, stored, weights)

    def pick(self, index: int, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> None:
        self.inner.pick(index, q, k, weights)


@dataclass(frozen=True, slots=True, eq=False)
class IdleAttention(AttentionContext):
    """The attention of a rank without rows: it stores nothing and returns no rows, of the usual width."""

    q_size: int

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        del heads
        assert len(qkv) == 0, qkv.shape
        return qkv[:, : self.q_size]

    def pick(self, index: int, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> None:
        del index, k, weights
        assert len(q) == 0, q.shape


@dataclass(frozen=True, slots=True, eq=False)
class _MixedAttention(AttentionContext):
    """The attention of two batches of one forward, each by its own way. The first may see tokens of the second, so the
    KV of the second is stored first."""

    first: AttentionContext
    second: AttentionContext
    num_first: int  # tokens of the first batch

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        first, second = qkv.tensor_split((self.num_first,))
        of_second = self.second(second, heads)
        return torch.cat([self.first(first, heads), of_second])

    def pick(self, index: int, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> None:
        own, other = zip(*(each.tensor_split((self.num_first,)) for each in (q, k, weights)), strict=True)
        self.second.pick(index, *other)
        self.first.pick(index, *own)

    def attend_latents(self, index: int, q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        (q, other_q), (stored, other) = q.tensor_split((self.num_first,)), stored.tensor_split((self.num_first,))
        of_second = self.second.attend_latents(index, other_q, other, weights)
        return torch.cat([self.first.attend_latents(index, q, stored, weights), of_second])
