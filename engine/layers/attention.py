"""The attention layer: q, k and v, the norms of their heads, the window, and the output projection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention import AttentionContext, HeadNorms
from ..products.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Attention with KV heads in the pool. What all layers of a forward share is the forward's `AttentionContext`."""

    index: int  # of the layer in the pool
    qkv: Linear  # in_size -> q_size + 2 * kv_size
    head_norms: HeadNorms | None
    window: int | None  # positions that a query sees, its own included; None: all
    out: Linear  # q_size -> hidden_size

    def __call__(self, normed: Tensor, context: AttentionContext) -> Tensor:
        """Store the new tokens' KV and return the attended values: [num_tokens, in_size] -> [num_tokens, q_size].

        The output projection is left to the caller, because the residual stream takes it along (`Residual.add`)."""
        return context(self.index, self.qkv(normed), self.head_norms, self.window)
