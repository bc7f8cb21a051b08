"""Attention of DeepSeek-V4: queries of a latent, one key that is also the value, a window, and entries behind it.

    q_h = rotate(unit(up_h(norm(down(x)))))     of each head; unit: a norm without weights
    k   = rotate(norm(key(x)))                  one of each token, for all heads
    y   = out(rotate_back(attend(q, [k of the window ; entries])))     out has a small product for each group of heads

kernels/entries/entries.py says what entries are. An indexer may choose the entries that a token sees:

    score(t, e) = sum over h of w_h(x_t) * relu(q_h . key_e),     w(x) = weights(x) / sqrt(num_heads * head_dim)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...kernels.products.norm import Norm, rms_norm
from ..attention.compressed import CompressedAttention, EntryPool, WindowHeads
from ..checkpoint.model_config import IndexConfig
from ..products.base import Rows
from ..products.groups import Groups
from ..products.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Compressor:
    """Makes entries of the tokens of a layer. The same on every rank."""

    kv_gate: Linear  # hidden_size -> 2 * columns, kv first
    pool: EntryPool

    def __call__(self, x: Tensor, context: CompressedAttention) -> None:
        """Store what new tokens [num_tokens, hidden_size] leave, and the entries that they end."""
        context.compress(self.pool, self.kv_gate(x))


@dataclass(frozen=True, slots=True, eq=False)
class EntryIndexer:
    """Chooses the entries that a token sees. The same on every rank, because a sum over heads has one order."""

    config: IndexConfig
    keys: Compressor  # its entries are index keys
    up: Linear  # query_rank -> num_heads * head_dim
    weights: Tensor  # [num_heads, hidden_size] float32, divided by sqrt(num_heads * head_dim)

    def __call__(self, x: Tensor, query_latent: Rows, context: CompressedAttention) -> Any:
        """Store the keys of new tokens, and return the entries that they choose, for `attend`."""
        num_heads, head_dim = self.config.num_heads, self.config.head_dim
        self.keys(x, context)
        q = self.up(query_latent).unflatten(1, (num_heads, head_dim))
        return context.choose(self.keys.pool, q, F.linear(x.float(), self.weights), self.config.num_picks)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedOut:
    """The output projection: a product for each group of heads, and one of all that they give."""

    groups: Groups  # group_size -> group_rank, each
    out: Linear  # num_groups * group_rank -> hidden_size

    def __call__(self, attended: Tensor, context: CompressedAttention) -> Tensor:
        """Return the output: [num_tokens, num_heads, head_dim] -> [num_tokens, hidden_size]."""
        return self.out(self.groups(attended.flatten(1), context.once))


@dataclass(frozen=True, slots=True, eq=False)
class WindowedAttention:
    """Attention of one layer to its window and, if it has a compressor, to entries."""

    down: Linear  # hidden_size -> query_rank + head_dim
    query_norm: Norm  # [query_rank]
    up: Linear  # query_rank -> num_heads * head_dim
    heads: WindowHeads
    out: GroupedOut
    compressor: Compressor | None = None
    indexer: EntryIndexer | None = None

    def __call__(self, x: Tensor, context: CompressedAttention) -> Tensor:
        """Store the rows of new tokens, and return the layer's output: [num_tokens, hidden_size] -> [num_tokens,
        hidden_size]."""
        latent, key = self.down(x).tensor_split([len(self.query_norm.weight)], 1)
        rounds = self.up.rounds and (self.indexer is None or self.indexer.up.rounds)  # both alike
        rows = self.up.normed(latent, None, self.query_norm) if rounds else rms_norm(latent, *self.query_norm)
        q = self.up(rows).unflatten(1, (-1, key.shape[1]))
        q = context.store(self.heads, q, key)
        pool = chosen = None
        if self.compressor is not None:
            pool = self.compressor.pool
            self.compressor(x, context)
        if self.indexer is not None:
            chosen = self.indexer(x, rows, context)
        return self.out(context.attend(self.heads, q, pool, chosen), context)
