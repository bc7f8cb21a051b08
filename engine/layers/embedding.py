"""The two ends of a model: token ids to the residual stream, and hidden states to logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.state.rows import gather_rows
from ..products.base import VOCAB
from ..products.linear import Linear
from ..ranks.ranks import ONE_RANK, Ranks, VocabShares
from ..sampling.row_shares import Lens


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Owns the table of embeddings."""

    weight: Tensor  # [vocab_size, hidden_size]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return copies of the rows `token_ids` [num_tokens] int64: [num_tokens, hidden_size].

        On CUDA torch's own `embedding` takes a few tokens one after the other, so a kernel of ours gathers them."""
        return gather_rows([self.weight], token_ids)[0]


@dataclass(frozen=True, slots=True, eq=False)
class LmHead:
    """Owns the product of the output layer, or this rank's share of it. With tied embeddings it multiplies by the
    embedding's table."""

    linear: Linear  # hidden_size -> vocab_size, or the share
    shares: VocabShares | None = None  # None: the product is whole

    @classmethod
    def tied(cls, embedding: Embedding, ranks: Ranks = ONE_RANK) -> LmHead:
        """Return the head that shares the weight of `embedding`, or some of its rows."""
        shard, weight = ranks.shard(VOCAB), embedding.weight
        own = weight if shard is None else shard.take(weight, 0)
        return cls(Linear.of(own), ranks.vocab(len(weight)))

    def __call__(self, hidden: Tensor, lens: Lens | None = None) -> Tensor:
        """Return logits of the model's dtype: [num_rows, hidden_size] -> [num_rows, vocab_size]. If the rows are
        divided into `lens`, return those of this rank's rows alone."""
        logits = self.linear(hidden)
        if self.shares is None:
            assert lens is None, "one rank has all rows"
            return logits
        return self.shares.whole(logits) if lens is None else self.shares.rows(logits, lens)
