"""The pre-norm decoder of Llama, Mistral, Qwen2 and Qwen3; ModelConfig says where they differ.

h = embedding[input_ids]
for every layer:
    h += attention_out(attention(rotary(qkv(norm(h)))))
    h += down(silu(gate(norm(h))) * up(norm(h)))
hidden = norm(h);  logits = lm_head(hidden)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...kernels.attention import AttentionPlan, clear_fresh_pages, paged_attention, store_kv
from ...kernels.norm import rms_norm
from ...kernels.rotary import apply_rotary_
from ..batch import ForwardBatch
from ..dense_kv import DenseKv
from ..model_config import ModelConfig
from ..rope import RotaryEmbedding
from ..weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What the layers of one forward share."""

    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # [num_tokens, 1, head_dim], signed
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, 2, num_kv_heads, page_size, head_dim]
    plan: AttentionPlan
    dense: DenseKv | None


class LlamaModel:
    """Owns weights; the KV pool belongs to the caller."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.dense = DenseKv() if self.device.type == "cpu" else None
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, self.device)

    @property
    def handoff_hidden_size(self) -> int:
        """Width of the state that prefill hands to a drafter: for this family, the hidden state after the last norm."""
        return self.config.hidden_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        """Store the new tokens' KV in their pages and return their hidden states after the final norm,
        [num_tokens, hidden_size].

        `kv` [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim], of the model's dtype."""
        config = self.config
        shape = (config.num_layers, 2, config.num_kv_heads, batch.page_size, config.head_dim)
        assert (kv.shape[0], *kv.shape[2:]) == shape and kv.dtype == self.dtype, (kv.shape, kv.dtype, shape)
        plan = batch.attention_plan(config.num_kv_heads, config.sliding_window, self.dtype)
        clear_fresh_pages(kv, plan)
        dense = self.dense if self.dense is not None and self.dense.begin(batch, kv) else None
        step = _Step(*self._rotary(batch.positions, self.dtype), kv.unbind(0), plan, dense)
        hidden = F.embedding(batch.input_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            hidden = hidden.add_(self._attention(index, layer, hidden, step))
            hidden = hidden.add_(self._mlp(layer, hidden))
        return rms_norm(hidden, self.weights.norm, config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, [num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        return self.weights.lm_head(hidden).float()

    def _attention(self, index: int, layer: LayerWeights, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        config = self.config
        num_tokens, num_heads, num_rotated = hidden.shape[0], config.num_heads, config.num_heads + config.num_kv_heads
        normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
        qkv = layer.qkv(normed).view(num_tokens, num_rotated + config.num_kv_heads, config.head_dim)
        q, kv_new = qkv[:, :num_heads], qkv[:, num_heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            k = qkv[:, num_heads:num_rotated]
            q.copy_(rms_norm(q, layer.q_norm, config.rms_norm_eps))
            k.copy_(rms_norm(k, layer.k_norm, config.rms_norm_eps))
        apply_rotary_(qkv[:, :num_rotated], step.cos, step.sin)
        kv_layer, window = step.kv_layers[index], config.sliding_window[index]
        store_kv(kv_new, kv_layer, step.plan)
        if step.dense is None:
            out = paged_attention(q, kv_layer, step.plan, window)
        else:
            out = step.dense.attend(index, q, kv_new, kv_layer, step.plan, window)
        return layer.attention_out(out.view(num_tokens, -1))

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))
