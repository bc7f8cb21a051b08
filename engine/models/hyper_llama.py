"""Llama with static hyper-connections (Zhu et al. 2024, arXiv:2409.19606): S = hc_mult residual streams instead of one.

s_0 .. s_(S-1) = embedding[input_ids], each
at both sites of every layer (attention, mlp):
    y = branch(norm(sum_a read[a] s_a));   s_b <- sum_a mix[a, b] s_a + write[b] y
handoff = [s_0 ; .. ; s_(S-1)];   hidden = norm(sum_a s_a);   logits = lm_head(hidden)

The handoff state is taken before the streams collapse (docs/drafter_checkpoints.md). Streams are [num_tokens, hc_mult,
hidden_size].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.norm import add_rms_norm_
from ..attention import Attention, begin_attention
from ..batch import ForwardBatch
from ..layers import embed
from ..weights import LayerWeights, StreamSite
from .llama import LlamaModel, TargetStates


class HyperLlamaModel(LlamaModel):
    """Llama with two or more residual streams; with one stream the model is a LlamaModel (models/registry.py)."""

    @torch.inference_mode()
    def forward_with_aux(self, batch: ForwardBatch, kv: torch.Tensor, aux_layers: Sequence[int]) -> TargetStates:
        """Run LlamaModel's method of this name; the auxiliary states are collapsed."""
        assert kv.dtype == self.dtype, (kv.dtype, self.dtype)
        config, eps = self.config, self.config.rms_norm_eps
        attend = begin_attention(config, self._rotary, batch, kv)
        embedded = embed(batch.input_ids, self.weights.embedding)
        streams = embedded.unsqueeze(1).expand(-1, config.hc_mult, -1)
        aux: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.weights.layers):
            if index in aux_layers:
                aux[index] = streams.sum(1)
            streams = stream_layer(streams, index, layer, attend, eps)
        aux[config.num_layers] = collapsed = streams.sum(1)
        final = add_rms_norm_(collapsed, None, self.weights.norm, eps)
        handoff = final if config.hands_over_collapsed else streams.flatten(1)
        return TargetStates(final, handoff, [aux[index] for index in aux_layers])


def stream_layer(streams: torch.Tensor, index: int, layer: LayerWeights, attend: Attention, eps: float) -> torch.Tensor:
    """Layer `index` of a forward, [num_tokens, hc_mult, hidden_size] to the same; `streams` stays as it is."""
    assert layer.attention_site is not None and layer.mlp_site is not None, index
    normed = add_rms_norm_(_read(streams, layer.attention_site), None, layer.attention_norm, eps)
    streams = _write(streams, layer.attention_site, layer.attention_out(attend(index, layer, layer.qkv(normed))))
    normed = add_rms_norm_(_read(streams, layer.mlp_site), None, layer.mlp_norm, eps)
    return _write(streams, layer.mlp_site, layer.down(layer.gate_up.gated(normed)))


def _read(streams: torch.Tensor, site: StreamSite) -> torch.Tensor:
    """Return the input of the branch, [num_tokens, hidden_size]."""
    return torch.matmul(site.read, streams)


def _write(streams: torch.Tensor, site: StreamSite, y: torch.Tensor) -> torch.Tensor:
    """The streams mixed, with the branch's `y` [num_tokens, hidden_size] added to each."""
    return torch.matmul(site.mix.T, streams).addcmul_(site.write.unsqueeze(1), y.unsqueeze(1))
