"""Sparse attention on a CPU: an indexer's picks become a mask of what each token sees (kernels/attention/picks.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...kernels.attention.picks import Sight, index_scores, pick, picked
from ...kernels.products.rotary import apply_rotary_
from ..checkpoint.model_config import IndexConfig
from ..rounds.batch import ForwardBatch
from .context import AttentionContext, CosSin, LayerHeads


def rotate_index_(q: torch.Tensor, k: torch.Tensor, cos_sin: CosSin) -> None:
    """Rotate the first numbers of index queries [num_tokens, num_heads, head_dim] and keys [num_tokens, head_dim] in
    place."""
    rotary_dim = cos_sin[0].shape[2]
    apply_rotary_(q[..., :rotary_dim], *cos_sin)
    apply_rotary_(k.unsqueeze(1)[..., :rotary_dim], *cos_sin)


@dataclass(slots=True, eq=False)
class PickedAttention(AttentionContext):
    """Attention to the tokens that the last layer with an indexer picked. If there are no more tokens than picks, all
    are picked."""

    num_picks: int
    sight: Sight
    cos_sin: CosSin
    keys: torch.Tensor  # the pool of index keys, [num_index_layers, num_pages, 1, 1, page_size, head_dim]
    seeing: Callable[[torch.Tensor], AttentionContext]  # [num_tokens, num_slots] bool -> attention of what is seen
    _inner: AttentionContext | None = field(default=None, init=False)

    @classmethod
    def of(
        cls,
        index: IndexConfig,
        batch: ForwardBatch,
        cos_sin: CosSin,
        keys: torch.Tensor,
        seeing: Callable[[torch.Tensor], AttentionContext],
    ) -> PickedAttention:
        """Return the attention of a batch. Arguments are as in the fields."""
        sight = Sight.of(batch.block_table, batch.query_lens, batch.seq_lens, batch.tree)
        return cls(index.num_picks, sight, cos_sin, keys, seeing)

    def pick(self, index: int, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> None:
        keys = self.keys[index]
        rotate_index_(q, k, self.cos_sin)
        keys.view(-1, keys.shape[-1]).index_copy_(0, self.sight.rows(keys.shape[3]), k)
        scores = index_scores(q, weights, keys, self.sight)
        self._inner = self.seeing(picked(pick(scores, self.num_picks), scores.shape[1]))

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        assert self._inner is not None, "a layer without an indexer is the first"
        return self._inner(qkv, heads)
