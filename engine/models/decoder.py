"""A decoder-only model: embedding, decoder layers over one residual stream, last norm, head.

h = embedding[input_ids]
for every layer:
    h += attention.out(attention(norm(h)))
    h += mlp(norm(h))
hidden = norm(h);  logits = lm_head(hidden)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels.products.fp8 import E4M3
from ...kernels.sampling.sample import Choice, perturbed_argmax
from ...kernels.state.rows import gather_rows
from ..attention.attention import RotaryEmbedding, begin_attention
from ..attention.context import AttentionByWindow, AttentionContext
from ..checkpoint.model_config import ModelConfig
from ..layers.decoder import DecoderLayer, Residual
from ..products.base import VOCAB
from ..products.linear import Linear
from ..ranks.ranks import ONE_RANK, Ranks, VocabShares
from ..rounds.batch import ForwardBatch, MixedBatch
from ..sampling.row_shares import Lens
from ..state.model_pools import ModelPools


class TargetStates(NamedTuple):
    """States that a forward leaves for the head and for drafters."""

    final: Tensor  # [num_tokens, hidden_size], after the last norm: what `logits` takes
    handoff: Tensor  # [num_tokens, handoff_hidden_size], what the family hands to a drafter
    aux: list[Tensor]  # residual streams at the inputs of chosen layers, each [num_tokens, hidden_size]


class Stack(Protocol):
    """All layers of a model and its last norm, over the residual stream or streams of the family."""

    def __call__(
        self, input_ids: Tensor, embedded: Tensor, context: AttentionContext, aux_layers: Sequence[int]
    ) -> TargetStates:
        """Run the layers on `embedded` [num_tokens, hidden_size], which may be overwritten: the embeddings of
        `input_ids` [num_tokens] int64. `aux_layers`: layers whose inputs are wanted (num_layers: the last layer's
        output)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DecoderStack:
    """Layers over one residual stream; the handoff state is the hidden state after the last norm."""

    layers: tuple[DecoderLayer, ...]
    norm: Tensor  # [hidden_size]
    eps: float

    def __call__(
        self, input_ids: Tensor, embedded: Tensor, context: AttentionContext, aux_layers: Sequence[int]
    ) -> TargetStates:
        del input_ids
        stream = Residual(embedded, self.eps)
        aux: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            normed = layer.normed(stream)
            if index in aux_layers:
                aux[index] = stream.hidden.clone()
            layer.body(stream, normed, context)
        final = stream.normed(self.norm)
        aux[len(self.layers)] = stream.settled()
        return TargetStates(final, final, [aux[index] for index in aux_layers])


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Owns the table of embeddings."""

    weight: Tensor  # [vocab_size, hidden_size]
    scale: float = 1.0  # of the rows; a number of the weight's dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return scaled copies of the rows `token_ids` [num_tokens] int64: [num_tokens, hidden_size].

        On CUDA torch's own `embedding` takes a few tokens one after the other, so a kernel of ours gathers them."""
        rows = gather_rows([self.weight], token_ids)[0]
        return rows if self.scale == 1 else rows.mul_(self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class LmHead:
    """Owns the product of the output layer, or this rank's share of it. With tied embeddings it multiplies by the
    embedding's table."""

    linear: Linear  # hidden_size -> vocab_size, or the share
    shares: VocabShares | None = None  # None: the product is whole
    softcap: float | None = None  # logits are cap * tanh(logits / cap)

    @classmethod
    def tied(cls, embedding: Embedding, ranks: Ranks = ONE_RANK) -> LmHead:
        """Return the head that shares the weight of `embedding`, or some of its rows."""
        shard, weight = ranks.shard(VOCAB), embedding.weight
        own = weight if shard is None else shard.take(weight, 0)
        return cls(Linear.of(own), ranks.vocab(len(weight)))

    def __call__(self, hidden: Tensor, lens: Lens | None = None) -> Tensor:
        """Return logits of the model's dtype: [num_rows, hidden_size] -> [num_rows, vocab_size]. If the rows are
        divided into `lens`, return those of this rank's rows alone."""
        logits = self.own(hidden)
        if self.shares is None:
            assert lens is None, "one rank has all rows"
            return logits
        return self.shares.whole(logits) if lens is None else self.shares.rows(logits, lens)

    def own(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's share of the vocabulary."""
        logits, cap = self.linear(hidden), self.softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class DecoderModel:
    """Owns the weights. The KV pool belongs to the caller. Drafters call `embed` and `logits`, and read no weights."""

    def __init__(self, config: ModelConfig, embedding: Embedding, stack: Stack, lm_head: LmHead) -> None:
        self.config = config
        self.dtype = embedding.weight.dtype
        self.device = embedding.weight.device
        self.stack = stack
        self._embedding, self._lm_head = embedding, lm_head
        kinds = (config.of_attention,) if config.window is None else config.by_window()
        rotaries = {
            turn: RotaryEmbedding(turn[0], turn[1], self.device, turn[2])
            for turn in ((each.rope, each.rotated_size, each.rotary_dim) for each in kinds)
        }
        self._kinds = tuple((each, rotaries[each.rope, each.rotated_size, each.rotary_dim]) for each in kinds)

    @property
    def handoff_hidden_size(self) -> int:
        """Width of the state that is handed to a drafter: for most families, the hidden state after the last norm."""
        return self.config.handoff_hidden_size

    def forward(self, batch: ForwardBatch, pools: ModelPools) -> Tensor:
        """Store the new tokens' KV in their pages and return their hidden states after the last norm,
        [num_tokens, hidden_size]."""
        return self.forward_with_aux(batch, pools, ()).final

    @torch.inference_mode()
    def forward_with_aux(
        self, batch: ForwardBatch | MixedBatch, pools: ModelPools, aux_layers: Sequence[int]
    ) -> TargetStates:
        """Run `forward`, and return also the states for drafters: the handoff state, and the residual stream at the
        inputs of `aux_layers` (num_layers: the last layer's output)."""
        ids = batch.input_ids
        return self.stack(ids, self.embed(ids), self.begin(batch, pools), aux_layers)

    def begin(self, batch: ForwardBatch | MixedBatch, pools: ModelPools) -> AttentionContext:
        """Return what the attention layers of one forward share."""
        assert pools.kv.dtype in (self.dtype, E4M3), (pools.kv.dtype, self.dtype)
        if len(self._kinds) == 1:
            [(config, rotary)] = self._kinds
            return begin_attention(config, rotary, batch, pools, self.dtype)
        batches = [batch, batch.of_tails() if self.config.has_tail else batch]
        turns = {rotary: functools.cache(rotary) for _, rotary in self._kinds}  # kinds that turn alike share the angles
        contexts = [
            begin_attention(config, turns[rotary], seen, own, self.dtype)
            for (config, rotary), seen, own in zip(self._kinds, batches, pools.by_window, strict=True)
        ]
        return AttentionByWindow(*contexts)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of `token_ids` [num_tokens] int64: [num_tokens, hidden_size], a new tensor."""
        return self._embedding(token_ids)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, lens: Lens | None = None) -> Tensor:
        """Return logits of rows of `forward`'s result, [num_rows, hidden_size] -> [num_rows, vocab_size] of the model's
        dtype. If the rows are divided into `lens`, return those of this rank's rows alone."""
        return self._lm_head(hidden, lens)

    @torch.inference_mode()
    def best(self, hidden: Tensor) -> Choice:
        """Return the token of the largest logit of each row of `hidden` [num_rows, hidden_size], as `perturbed_argmax`
        does. No rank needs all logits for it."""
        shares = self._lm_head.shares
        if shares is None:
            return perturbed_argmax(self.logits(hidden))
        return shares.best(self._lm_head.own(hidden))
