"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1), with its projections absorbed.

    plain | rotary = up(norm(down(x)))      of each head; a model without a latent of queries has up(x)
    c | r = latent_down(x)                  of each token; the pool holds norm(c) | rotate(r)
    q = W_K^T plain | rotate(rotary)        its product with the pool is that of plain | rotary with the head's keys
    out = W_V attention(q)                  attention weighs the latents themselves

All heads share one KV head. It is as wide as a latent with the rotated part of a key, and its values are its keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.latents import join_latents
from ...kernels.norm import Norm, rms_norm
from ..attention import AttentionContext
from ..model_config import LatentConfig
from ..products.base import Rows
from ..products.linear import Linear

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
    key_up: Tensor  # [num_heads, plain_dim, rank], W_K
    value_up: Tensor  # [num_heads, rank, value_dim], W_V transposed
    out: Linear  # num_heads * value_dim -> hidden_size

    @property
    def reader(self) -> Linear:
        return self.down

    def __call__(self, normed: Rows, context: AttentionContext) -> Tensor:
        """Store the new tokens' latents and return the attended values: [num_tokens, hidden_size] -> [num_tokens,
        num_heads * value_dim]."""
        latent, num_heads = self.latent, len(self.key_up)
        q, stored = self.down(normed).tensor_split([-latent.rank - latent.rope_dim], dim=1)
        if self.query_up is not None and self.query_norm is not None:
            q = self.query_up(rms_norm(q, self.query_norm, _EPS))
        plain, rotary = q.unflatten(1, (num_heads, -1)).tensor_split([latent.plain_dim], dim=2)
        absorbed = torch.bmm(plain.transpose(0, 1), self.key_up).transpose(0, 1)  # [num_tokens, num_heads, rank]
        norm = Norm(self.latent_norm, _EPS)
        heads = join_latents(absorbed, rotary, stored, norm, is_interleaved=latent.is_interleaved)
        attended = context(self.index, heads.flatten(1), None, None).unflatten(1, (num_heads, -1))
        values = torch.bmm(attended[..., : latent.rank].transpose(0, 1), self.value_up)
        return values.transpose(0, 1).flatten(1)
