"""The attention layer: q, k and v, their norms, the window, and the output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.context import AttentionContext, HeadNorms, LayerHeads
from ..products.base import Rows, WeightShard
from ..products.linear import Linear
from ..ranks.group import Group


@dataclass(frozen=True, slots=True, eq=False)
class WideNorms:
    """Norms of q and of k over all heads together. If ranks have some of the heads each, they sum the squares."""

    q: Tensor  # [q_size], of this rank's heads
    k: Tensor  # [kv_size]
    sizes: tuple[int, int]  # of q and k of all heads
    eps: float
    group: Group | None = None
    num_alike: int = 1  # ranks that have the same heads of k

    @classmethod
    def of(cls, q: Tensor, k: Tensor, eps: float, shard: WeightShard | None, group: Group) -> Self:
        """Return the norms of a rank, given the weights of all heads."""
        sizes = len(q), len(k)
        if shard is None:
            return cls(q, k, sizes, eps)
        own = shard.take(q, 0).clone(), shard.take(k, 1).clone()
        return cls(*own, sizes, eps, group, shard.size // shard.count(1))

    def apply_(self, qkv: Tensor) -> None:
        """Norm q and k of `qkv` [num_tokens, q_size + 2 * kv_size] in place, in float32, rounded before the weights."""
        parts, weights = qkv.split([len(self.q), len(self.k), len(self.k)], 1)[:2], (self.q, self.k)
        wide = [part.float() for part in parts]
        squares = torch.cat([each.pow(2).sum(1, keepdim=True) for each in wide], 1)
        if self.group is not None:
            squares = self.group.sum(squares)
        counts = self.sizes[0], self.sizes[1] * self.num_alike
        for part, each, weight, square, count in zip(parts, wide, weights, squares.split(1, 1), counts, strict=True):
            part.copy_((each * torch.rsqrt(square / count + self.eps)).to(qkv.dtype) * weight)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Attention with KV heads in the pool. What all layers of a forward share is the forward's `AttentionContext`."""

    index: int  # of the layer in the pool
    qkv: Linear  # in_size -> q_size + 2 * kv_size
    head_norms: HeadNorms | None
    window: int | None  # positions that a query sees, its own included; None: all
    out: Linear  # q_size -> hidden_size
    wide_norms: WideNorms | None = None
    sinks: Tensor | None = None  # [num_heads] float32, scores without a value, of this rank's heads

    @property
    def reader(self) -> Linear:
        return self.qkv

    def __call__(self, normed: Rows, context: AttentionContext) -> Tensor:
        """Store the new tokens' KV and return the attended values: [num_tokens, in_size] -> [num_tokens, q_size].

        The output projection is left to the caller, because the residual stream takes it along (`Residual.add`)."""
        qkv = self.qkv(normed)
        if self.wide_norms is not None:
            self.wide_norms.apply_(qkv)
        return context(qkv, LayerHeads(self.index, self.head_norms, self.window, self.sinks))


@dataclass(frozen=True, slots=True, eq=False)
class _Around:
    """A `SelfAttention` by the projections of an ordinary one."""

    inner: Attention

    @property
    def reader(self) -> Linear:
        return self.inner.qkv

    @property
    def out(self) -> Linear:
        return self.inner.out


@dataclass(frozen=True, slots=True, eq=False)
class NarrowAttention(_Around):
    """Attention whose values are narrower than keys. Pages hold the narrow values; attention sees them filled up with
    zeros (ModelConfig.value_dim). The projection of q, k and v: hidden_size -> q_size + num_kv_heads * (head_dim +
    value_dim)."""

    head_dim: int
    value_dim: int
    num_kv_heads: int  # of this rank
    value_scale: float
    order: Tensor | None = None  # of the numbers of all q and k, int64; None: the product has them in it

    def __call__(self, normed: Rows, context: AttentionContext) -> Tensor:
        """Store the new tokens' KV and return the attended values: [num_tokens, hidden_size] -> [num_tokens, num_heads
        * value_dim]."""
        inner = self.inner
        qk, v = inner.qkv(normed).tensor_split([-self.num_kv_heads * self.value_dim], 1)
        qk = qk if self.order is None else qk.index_select(1, self.order)
        narrow = v.unflatten(1, (self.num_kv_heads, self.value_dim)) * self.value_scale
        filled = F.pad(narrow, (0, self.head_dim - self.value_dim)).flatten(1)
        heads = LayerHeads(inner.index, inner.head_norms, inner.window, inner.sinks)
        attended = context(torch.cat([qk, filled], 1), heads)
        return attended.unflatten(1, (-1, self.head_dim))[..., : self.value_dim].flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class GatedAttention(_Around):
    """Attention whose output has a gate, the sigmoid of as many numbers, which come with the queries. The projection of
    q, k and v: in_size -> 2 * q_size + 2 * kv_size, of each head the query and the gate."""

    q_size: int  # of this rank
    head_dim: int
    order: Tensor | None = None  # [head_dim] int64, of a query or key; None: the product has its numbers in it

    def __call__(self, normed: Rows, context: AttentionContext) -> Tensor:
        """Store the new tokens' KV and return the gated values: [num_tokens, in_size] -> [num_tokens, q_size]."""
        inner = self.inner
        queries, kv = inner.qkv(normed).tensor_split([2 * self.q_size], 1)
        q, gate = queries.unflatten(1, (-1, 2, self.head_dim)).unbind(2)
        if self.order is not None:
            k, v = kv.unflatten(1, (2, -1, self.head_dim)).unbind(1)
            q, kv = q.index_select(2, self.order), torch.cat([k.index_select(2, self.order), v], 1).flatten(1)
        heads = LayerHeads(inner.index, inner.head_norms, inner.window, inner.sinks)
        attended = context(torch.cat([q.flatten(1), kv], 1), heads)
        return attended * torch.sigmoid(gate.flatten(1))
