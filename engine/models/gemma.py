"""Gemma 3 and 4: norms before and after each sublayer, scaled embeddings, and a window in most layers, whose rotary
embeddings are others.

In Gemma 4, layers with a window also have other heads than those without one, the last layers share KV, and each layer
gets numbers of its own for each token, and may have experts beside its dense feed-forward layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.products.norm import rms_norm
from ..attention.context import AttentionContext, HeadNorms
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Weights
from ..layers.decoder import DecoderLayer, Residual
from ..layers.moe import ExpertRouter
from ..layers.per_layer_decoder import ExpertsBeside, LayerInput, LayerNorms, PerLayerDecoder, SharingAttention
from ..layers.sandwich_decoder import GeluMlp, SandwichBody
from ..products.base import HEADS_IN, INNER_IN, INNER_OUT, Split
from ..products.experts import choose_experts_product
from ..products.linear import Linear
from .decoder import DecoderModel, DecoderStack, Embedding, LmHead, TargetStates
from .llama import norm_weight, read_attention, read_ends, read_norm
from .mixtures import stacked_sources

_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """The numbers that layers get for each token: of the token itself, and of its embedding."""

    table: Embedding  # [input_vocab_size, num_layers * input_size]
    projection: Linear  # hidden_size -> num_layers * input_size
    norm: Tensor  # [input_size]
    scale: float  # of the product
    eps: float

    def __call__(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return the numbers [num_tokens, num_layers, input_size] of tokens with embeddings [num_tokens,
        hidden_size]."""
        shape = (-1, len(self.norm))
        projected = self.projection(embedded).mul_(self.scale).unflatten(1, shape)
        of_tokens = self.table(input_ids).unflatten(1, shape)
        return rms_norm(projected, self.norm, self.eps).add_(of_tokens).mul_(2**-0.5)


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerStack:
    """Layers over one residual stream; the handoff state is the hidden state after the last norm."""

    layers: tuple[PerLayerDecoder, ...]
    inputs: LayerInputs | None
    norm: Tensor  # [hidden_size]
    eps: float

    def __call__(
        self, input_ids: Tensor, embedded: Tensor, context: AttentionContext, aux_layers: Sequence[int]
    ) -> TargetStates:
        numbers = None if self.inputs is None else self.inputs(input_ids, embedded)
        stream = Residual(embedded, self.eps)
        aux: dict[int, Tensor] = {}
        kept: dict[bool, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                aux[index] = stream.settled().clone()
            layer(stream, context, kept, None if numbers is None else numbers[:, index])
        final = stream.normed(self.norm)
        aux[len(self.layers)] = stream.settled()
        return TargetStates(final, final, [aux[index] for index in aux_layers])


def read_gemma3(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of Gemma 3 and build its layers."""
    layers = tuple(_read_sandwich(config, weights, f"model.layers.{i}", i) for i in range(config.num_layers))
    embedding, lm_head = _read_ends(config, weights)
    stack = DecoderStack(layers, read_norm(config, weights), config.rms_norm_eps)
    return DecoderModel(weights.own(config), embedding, stack, lm_head)


def _read_ends(config: ModelConfig, weights: Weights) -> tuple[Embedding, LmHead]:
    """Read the embedding, which is scaled, and the head, whose logits may have a cap."""
    embedding, lm_head = read_ends(config, weights)
    scale = _rounded(config.hidden_size**0.5, weights.dtype)
    return replace(embedding, scale=scale), replace(lm_head, softcap=config.softcap)


def _rounded(scale: float, dtype: torch.dtype) -> float:
    """Return the scale of an embedding as transformers rounds it."""
    return torch.tensor(scale).to(dtype).item()


def _read_sandwich(config: ModelConfig, weights: Weights, prefix: str, index: int) -> DecoderLayer:
    size = config.hidden_size
    norms = [norm_weight(config, weights, f"{prefix}.{name}_layernorm", size) for name in _NORMS]
    attention = read_attention(config, weights, f"{prefix}.self_attn", index, size)
    mlp = _read_mlp(config, weights, f"{prefix}.mlp", config.intermediate_size)
    return DecoderLayer(norms[0], SandwichBody(attention, norms[2], mlp, norms[1], norms[3]))


def _read_mlp(config: ModelConfig, weights: Weights, prefix: str, inner_size: int) -> GeluMlp:
    """Read a gated feed-forward layer of `inner_size` hidden units."""
    size = config.hidden_size
    sizes = {f"{prefix}.gate_proj": inner_size, f"{prefix}.up_proj": inner_size}
    return GeluMlp(
        weights.fused(sizes, size, bias=False, split=INNER_OUT),
        weights.linear(f"{prefix}.down_proj", size, inner_size, bias=False, split=INNER_IN),
    )


def read_gemma4(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of Gemma 4 and build its layers."""
    layers: list[PerLayerDecoder] = []
    for index in range(config.num_layers):
        layers.append(_read_layer(config, weights, index, layers))
    embedding, lm_head = _read_ends(config, weights)
    inputs = _read_inputs(config, weights)
    stack = PerLayerStack(tuple(layers), inputs, read_norm(config, weights), config.rms_norm_eps)
    return DecoderModel(weights.own(config), embedding, stack, lm_head)


def _read_inputs(config: ModelConfig, weights: Weights) -> LayerInputs | None:
    gemma4 = config.gemma4
    assert gemma4 is not None, config
    size, all_sizes = gemma4.input_size, gemma4.input_size * config.num_layers
    if not size:
        return None
    table = weights.tensor("model.embed_tokens_per_layer.weight", gemma4.input_vocab_size, all_sizes)
    return LayerInputs(
        Embedding(table, _rounded(size**0.5, weights.dtype)),
        weights.linear("model.per_layer_model_projection", all_sizes, config.hidden_size, bias=False),
        norm_weight(config, weights, "model.per_layer_projection_norm", size),
        config.hidden_size**-0.5,
        config.rms_norm_eps,
    )


def _read_layer(
    config: ModelConfig, weights: Weights, index: int, before: Sequence[PerLayerDecoder]
) -> PerLayerDecoder:
    gemma4, size, prefix = config.gemma4, config.hidden_size, f"model.layers.{index}"
    assert gemma4 is not None, config
    is_shared = index >= config.num_layers - gemma4.num_shared_layers
    inner_size = config.intermediate_size * (2 if is_shared and gemma4.has_wide_shared_mlp else 1)
    norms = LayerNorms(*(norm_weight(config, weights, f"{prefix}.{name}_layernorm", size) for name in _NORMS))
    layer_input = None
    if gemma4.input_size:
        layer_input = LayerInput(
            weights.linear(f"{prefix}.per_layer_input_gate", gemma4.input_size, size, bias=False),
            weights.linear(f"{prefix}.per_layer_projection", size, gemma4.input_size, bias=False),
            norm_weight(config, weights, f"{prefix}.post_per_layer_input_norm", size),
        )
    attention = _read_attention(config, weights, index, [layer.attention for layer in before] if is_shared else None)
    mlp = _read_mlp(config, weights, f"{prefix}.mlp", inner_size)
    scale, experts = weights.tensor(f"{prefix}.layer_scalar", 1), _read_experts(config, weights, prefix)
    return PerLayerDecoder(norms, attention, mlp, layer_input, scale, experts)


def _read_experts(config: ModelConfig, weights: Weights, prefix: str) -> ExpertsBeside | None:
    experts, size = config.experts, config.hidden_size
    if experts is None:
        return None
    num, router = experts.num_experts, f"{prefix}.router"
    scale = weights.tensor(f"{router}.scale", size, dtype=torch.float32) * size**-0.5
    names = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    dense_norm, in_norm, out_norm = (norm_weight(config, weights, f"{prefix}.{name}", size) for name in names)
    return ExpertsBeside(
        ExpertRouter(weights.tensor(f"{router}.proj.weight", num, size, dtype=torch.float32) * scale, None, experts),
        weights.tensor(f"{router}.per_expert_scale", num, dtype=torch.float32),
        choose_experts_product(stacked_sources(config, weights, f"{prefix}.experts")._replace(is_geglu=True)),
        dense_norm,
        in_norm,
        out_norm,
        weights.ranks.sum_of(INNER_IN),
    )


def _read_attention(
    config: ModelConfig, weights: Weights, index: int, shared: Sequence[SharingAttention] | None
) -> SharingAttention:
    """Read the attention of a layer. `shared`: of the layers before, of which it shares the KV of one."""
    gemma4, prefix, window = config.gemma4, f"model.layers.{index}.self_attn", config.sliding_window[index]
    assert gemma4 is not None, config
    kind, place = config.by_window()[window is not None], config.kv_place(index)
    values_are_keys = gemma4.values_are_keys and window is None
    sizes = {f"{prefix}.q_proj": kind.q_size}
    if shared is None:
        names = ("k_proj",) if values_are_keys else ("k_proj", "v_proj")
        sizes |= {f"{prefix}.{name}": kind.kv_size for name in names}
    num_parts = (config.num_heads, *(kind.num_kv_heads,) * (len(sizes) - 1))
    q_norm = norm_weight(config, weights, f"{prefix}.q_norm", kind.head_dim).mul_(kind.query_factor)
    if shared is None:
        k_norm = norm_weight(config, weights, f"{prefix}.k_norm", kind.head_dim)
    else:
        k_norm = next(each.norms.k for each in shared if (each.place, each.window) == (place, window))
    return SharingAttention(
        place,
        weights.fused(sizes, config.hidden_size, bias=config.qkv_bias, split=Split("heads", 0, num_parts)),
        HeadNorms(q_norm, k_norm),
        torch.ones(kind.head_dim, dtype=torch.float32, device=weights.device),
        window,
        weights.linear(f"{prefix}.o_proj", config.hidden_size, kind.q_size, bias=config.attention_bias, split=HEADS_IN),
        weights.own(kind).q_size,
        values_are_keys,
        config.rms_norm_eps,
    )
