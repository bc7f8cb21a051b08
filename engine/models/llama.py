"""The pre-norm decoder of Llama, Mistral, Qwen2 and Qwen3; ModelConfig says where they differ.

h = embedding[input_ids]
for every layer:
    h += attention_out(attention(rotary(qkv(norm(h)))))
    h += down(silu(gate(norm(h))) * up(norm(h)))
hidden = norm(h);  logits = lm_head(hidden)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..attention import begin_attention
from ..batch import ForwardBatch
from ..layers import Residual, embed
from ..model_config import ModelConfig
from ..rope import RotaryEmbedding
from ..weights import Weights


class TargetStates(NamedTuple):
    """States that a forward leaves for the head and for drafters."""

    final: torch.Tensor  # [num_tokens, hidden_size], after the last norm: what `logits` takes
    handoff: torch.Tensor  # [num_tokens, handoff_hidden_size], what the family hands to a drafter
    aux: list[torch.Tensor]  # residual streams at the inputs of chosen layers, each [num_tokens, hidden_size]


class LlamaModel:
    """Owns weights; the KV pool belongs to the caller."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, self.device)

    @property
    def handoff_hidden_size(self) -> int:
        """Width of the state that is handed to a drafter: for this family, the hidden state after the last norm."""
        return self.config.handoff_hidden_size

    def forward(self, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        """Store the new tokens' KV in their pages and return their hidden states after the final norm,
        [num_tokens, hidden_size].

        `kv` [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim], of the model's dtype."""
        return self.forward_with_aux(batch, kv, ()).final

    @torch.inference_mode()
    def forward_with_aux(self, batch: ForwardBatch, kv: torch.Tensor, aux_layers: Sequence[int]) -> TargetStates:
        """Run `forward`, and return also the states for drafters: the handoff state, and the residual stream at the
        inputs of `aux_layers` (num_layers: the last layer's output)."""
        assert kv.dtype == self.dtype, (kv.dtype, self.dtype)
        attend = begin_attention(self.config, self._rotary, batch, kv)
        stream = Residual(embed(batch.input_ids, self.weights.embedding), self.config.rms_norm_eps)
        aux: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.weights.layers):
            normed = stream.normed(layer.attention_norm)
            if index in aux_layers:
                aux[index] = stream.hidden.clone()
            stream.add(layer.attention_out, attend(index, layer, layer.qkv(normed)))
            stream.add(layer.down, stream.gated_product(layer.gate_up, layer.mlp_norm))
        final = stream.normed(self.weights.norm)
        aux[len(self.weights.layers)] = stream.settled()
        return TargetStates(final, final, [aux[index] for index in aux_layers])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, [num_rows, hidden_size] -> [num_rows, vocab_size] of the model's dtype."""
        return self.weights.lm_head(hidden)
