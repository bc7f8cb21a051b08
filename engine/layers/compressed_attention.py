"""Attention of DeepSeek-V4: queries of a latent, one key that is also the value, a window, and entries behind it.

    q_h = rotate(unit(up_h(norm(down(x)))))     of each head; unit: a norm without weights
    k   = rotate(norm(key(x)))                  one of each token, for all heads
    y   = out(rotate_back(attend(q, [k of the window ; entries])))     out has a small product for each group of heads

kernels/entries/entries.py says what entries are. An indexer may choose the entries that a token sees:

    score(t, e) = sum over h of w_h(x_t) * relu(q_h . key_e),     w(x) = weights(x) / sqrt(num_heads * head_dim)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.attention.picks import pick, picked
from ...kernels.entries.entries import attend_rows, rotate_pairs_
from ...kernels.products.norm import Norm, rms_norm
from ..attention.compressed import KV, CompressedAttention, EntryPool
from ..attention.pool_rows import NewRows
from ..checkpoint.model_config import IndexConfig
from ..products.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Compressor:
    """Makes entries of the tokens of a layer. The same on every rank."""

    kv_gate: Linear  # hidden_size -> 2 * columns, kv first
    pool: EntryPool

    def __call__(self, x: Tensor, context: CompressedAttention) -> None:
        """Store what new tokens [num_tokens, hidden_size] leave, and the entries that they end."""
        context.compress(self.pool, self.kv_gate(x).float())

    def seen(self, new: NewRows, device: torch.device) -> Tensor:
        """Return which entries each new token of a sequence sees, [num_tokens, num_entries] bool."""
        ends = torch.arange(new.start + 1, new.stop + 1, device=device) // self.pool.rate
        return torch.arange(new.stop // self.pool.rate, device=device) < ends.unsqueeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class EntryIndexer:
    """Chooses the entries that a token sees. The same on every rank, because a sum over heads has one order."""

    config: IndexConfig
    keys: Compressor  # its entries are index keys
    up: Linear  # query_rank -> num_heads * head_dim
    weights: Tensor  # [num_heads, hidden_size] float32

    def queries(self, x: Tensor, query_latent: Tensor, context: CompressedAttention) -> tuple[Tensor, Tensor]:
        """Store the keys of new tokens, and return their index queries [num_tokens, num_heads, head_dim] and the
        weights of the heads, [num_tokens, num_heads] float32."""
        num_heads, head_dim = self.config.num_heads, self.config.head_dim
        self.keys(x, context)
        q = self.up(query_latent).unflatten(1, (num_heads, head_dim))
        rotate_pairs_(q, *context.turns(self.keys.pool.frequencies))
        return q, F.linear(x.float(), self.weights) * (num_heads * head_dim) ** -0.5

    def choose(
        self, queries: tuple[Tensor, Tensor], new: NewRows, seen: Tensor, context: CompressedAttention
    ) -> Tensor:
        """Return which of the `seen` entries of a sequence its new tokens take, a tensor of its shape."""
        q, weights = (each[new.tokens] for each in queries)
        keys = context.entries(self.keys.pool, new).float()
        products = torch.einsum("thd,ed->the", q.float(), keys).relu_()
        scores = torch.einsum("the,th->te", products, weights).masked_fill(~seen, float("-inf"))
        return picked(pick(scores, self.config.num_picks), seen.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class GroupedOut:
    """The output projection: a product for each group of heads, and one of all that they give."""

    groups: Tensor  # [num_groups, group_rank, group_size]
    out: Linear  # num_groups * group_rank -> hidden_size

    def __call__(self, attended: Tensor) -> Tensor:
        """Return the output: [num_tokens, num_heads, head_dim] -> [num_tokens, hidden_size]."""
        parts = attended.flatten(1).unflatten(1, (len(self.groups), -1))
        return self.out(torch.bmm(parts.transpose(0, 1), self.groups.transpose(1, 2)).transpose(0, 1).flatten(1))


@dataclass(frozen=True, slots=True, eq=False)
class WindowedAttention:
    """Attention of one layer to its window and, if it has a compressor, to entries."""

    index: int  # of the layer in the pool of keys
    window: int  # tokens that a token sees, itself included
    down: Linear  # hidden_size -> query_rank + head_dim
    query_norm: Norm  # [query_rank]
    up: Linear  # query_rank -> num_heads * head_dim
    key_norm: Norm  # [head_dim]
    frequencies: Tensor  # [num_pairs] float32, radians per position
    sinks: Tensor  # [num_heads] float32, of this rank's heads
    out: GroupedOut
    compressor: Compressor | None = None
    indexer: EntryIndexer | None = None

    def __call__(self, x: Tensor, context: CompressedAttention) -> Tensor:
        """Store the rows of new tokens, and return the layer's output: [num_tokens, hidden_size] -> [num_tokens,
        hidden_size]."""
        head_dim, turns = len(self.key_norm.weight), context.turns(self.frequencies)
        latent, key = self.down(x).tensor_split([len(self.query_norm.weight)], 1)
        latent, key = rms_norm(latent, *self.query_norm), rms_norm(key, *self.key_norm).unsqueeze(1)
        q = self.up(latent).unflatten(1, (-1, head_dim))
        q = q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + self.query_norm.eps).to(q.dtype)
        rotate_pairs_(q, *turns)
        rotate_pairs_(key, *turns)
        context.tails.store(KV, self.index, key)
        queries = None
        if self.compressor is not None:
            self.compressor(x, context)
        if self.indexer is not None:
            queries = self.indexer.queries(x, latent, context)
        attended = torch.zeros_like(q)
        for new, tail in context.sequences():
            attended[new.tokens] = self._attend(q[new.tokens], new, tail, queries, context)
        rotate_pairs_(attended, turns[0], -turns[1])
        return self.out(attended)

    def _attend(
        self,
        q: Tensor,
        new: NewRows,
        tail: NewRows,
        queries: tuple[Tensor, Tensor] | None,
        context: CompressedAttention,
    ) -> Tensor:
        """Return the attention of the new tokens of one sequence, `q` [num_tokens, num_heads, head_dim]."""
        first = max(0, new.start - self.window + 1)
        keys = context.tails.read(KV, self.index, tail.pages, first, new.stop).flatten(1)
        slots, own = (torch.arange(at, new.stop, device=q.device) for at in (first, new.start))
        behind = own.unsqueeze(1) - slots
        seen = (behind >= 0) & (behind < self.window)
        if self.compressor is not None and new.stop >= self.compressor.pool.rate:
            entries, of_entries = context.entries(self.compressor.pool, new), self.compressor.seen(new, q.device)
            if self.indexer is not None and queries is not None:
                of_entries = self.indexer.choose(queries, new, of_entries, context)
            keys, seen = torch.cat([keys, entries]), torch.cat([seen, of_entries], 1)
        return attend_rows(q, keys, seen, self.sinks, q.shape[2] ** -0.5)
