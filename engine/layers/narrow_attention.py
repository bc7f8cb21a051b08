"""Attention whose values are narrower than keys. Pages hold the narrow values; attention sees them filled up with zeros
(ModelConfig.value_dim)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.context import AttentionContext, LayerHeads
from ..products.base import Rows
from ..products.linear import Linear
from .attention import Attention


@dataclass(frozen=True, slots=True, eq=False)
class NarrowAttention:
    """A `SelfAttention` (decoder.py) of narrow values."""

    inner: Attention  # its qkv: hidden_size -> q_size + num_kv_heads * (head_dim + value_dim)
    head_dim: int
    value_dim: int
    num_kv_heads: int  # of this rank
    value_scale: float

    @property
    def reader(self) -> Linear:
        return self.inner.qkv

    @property
    def out(self) -> Linear:
        return self.inner.out

    def __call__(self, normed: Rows, context: AttentionContext) -> Tensor:
        """Store the new tokens' KV and return the attended values: [num_tokens, hidden_size] -> [num_tokens, num_heads
        * value_dim]."""
        inner = self.inner
        qk, v = inner.qkv(normed).tensor_split([-self.num_kv_heads * self.value_dim], 1)
        narrow = v.unflatten(1, (self.num_kv_heads, self.value_dim)) * self.value_scale
        filled = F.pad(narrow, (0, self.head_dim - self.value_dim)).flatten(1)
        heads = LayerHeads(inner.index, inner.head_norms, inner.window, inner.sinks)
        attended = context(torch.cat([qk, filled], 1), heads)
        return attended.unflatten(1, (-1, self.head_dim))[..., : self.value_dim].flatten(1)
