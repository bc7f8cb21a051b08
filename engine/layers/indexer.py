"""The indexer of sparse attention (DSA, DeepSeek-V3.2): which tokens a token attends to.

    q_h = rotate(up_h(query latent))     of each index head
    k = rotate(layer_norm(key(x)))       one of each token, which the pool holds
    score(t, j) = sum over h of w_h(x_t) * relu(q_h . k_j),    w(x) = weights(x) / sqrt(num_heads * head_dim)

Only the first numbers of q and k are rotated. kernels/attention/picks.py says which scores win.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ...kernels.attention.latents import in_halves
from ..attention.context import AttentionContext
from ..checkpoint.model_config import IndexConfig
from ..products.linear import Linear

_EPS = 1e-6  # of the norm of keys, whatever config.json says of others


@dataclass(frozen=True, slots=True, eq=False)
class Indexer:
    """Chooses tokens for its layer and those behind it that have none. The same on every rank, because a sum over heads
    has one order."""

    index: int  # of the layer in the pool of index keys
    config: IndexConfig
    rope_dim: int  # numbers of a head that are rotated, the first ones
    up: Linear  # query_rank -> num_heads * head_dim
    key: Linear  # hidden_size -> head_dim
    key_norm: tuple[Tensor, Tensor]  # weight and bias, [head_dim] each
    weights: Tensor  # [num_heads, hidden_size] float32

    def __call__(self, normed: Tensor, query_latent: Tensor, context: AttentionContext) -> None:
        """Store the keys of new tokens, and let the attention of this and the next layers see the chosen tokens alone.

        `normed` is [num_tokens, hidden_size], `query_latent` [num_tokens, query_rank]."""
        config = self.config
        q = self.up(query_latent).unflatten(1, (config.num_heads, config.head_dim))
        k = F.layer_norm(self.key(normed), (config.head_dim,), *self.key_norm, eps=_EPS)
        weights = F.linear(normed.float(), self.weights) * (config.num_heads * config.head_dim) ** -0.5
        if config.is_interleaved:
            for rotated in (q[..., : self.rope_dim], k[..., : self.rope_dim]):
                rotated.copy_(in_halves(rotated))
        context.pick(self.index, q, k, weights)
