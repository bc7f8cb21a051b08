"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1).

    plain | rotary = up(norm(down(x)))      of each head; a model without a latent of queries has up(x)
    c | r = latent_down(x)                  of each token; the pool holds norm(c) | rotate(r)
    k, v = W_K c | r, W_V c                 of each head, with the c and r of the pool

Keys and values are not stored. kernels/attention/latents.py says how attention does without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.attention.latents import LatentWeights
from ...kernels.products.norm import Norm, rms_norm
from ..attention.context import AttentionContext
from ..checkpoint.model_config import LatentConfig
from ..products.base import Rows
from ..products.linear import Linear
from .indexer import Indexer

_EPS = 1e-6  # of the norms of latents, whatever config.json says of others


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """A `SelfAttention` (decoder.py) over latents in the pool."""

    index: int  # of the layer in the pool
    latent: LatentConfig
    down: Linear  # hidden_size -> query_rank, or all queries, then rank + rope_dim
    query_norm: Tensor | None  # [query_rank]
    query_up: Linear | None  # query_rank -> num_heads * (plain_dim + rope_dim); None: `down` has the queries
    latent_norm: Tensor  # [rank]
    up: Tensor  # [num_heads, plain_dim + value_dim, rank], W_K above W_V
    out: Linear  # num_heads * value_dim -> hidden_size
    indexer: Indexer | None = None  # of this layer; None: attention sees what the layer before it saw

    @property
    def reader(self) -> Linear | None:
        return self.down if self.indexer is None else None

    def __call__(self, normed: Rows, context: AttentionContext) -> Tensor:
        """Store the new tokens' latents and return the attended values: [num_tokens, hidden_size] -> [num_tokens,
        num_heads * value_dim]."""
        latent = self.latent
        q, stored = self.down(normed).tensor_split([-latent.rank - latent.rope_dim], dim=1)
        if self.query_up is not None and self.query_norm is not None:
            query_latent = rms_norm(q, self.query_norm, _EPS)
            if self.indexer is not None:
                assert isinstance(normed, Tensor), "an indexer reads the plain input"
                self.indexer(normed, query_latent, context)
            q = self.query_up(query_latent)
        weights = LatentWeights(Norm(self.latent_norm, _EPS), self.up, latent.plain_dim, latent.is_interleaved)
        return context.attend_latents(self.index, q.unflatten(1, (len(self.up), -1)), stored, weights)
