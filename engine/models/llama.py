"""Llama, Mistral, Qwen2 and Qwen3: the tensors' names, and the layers that are made of them.

The families differ in biases, head norms and windows, which ModelConfig says. Other families and draft heads that use
the same names read their layers by the functions of this file.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..attention.attention import rotary_order
from ..attention.context import HeadNorms
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Weights
from ..layers.attention import Attention, GatedAttention, WideNorms
from ..layers.decoder import DecoderBody, DecoderLayer, FeedForward, Mlp, SelfAttention
from ..products.base import HEADS_IN, INNER_IN, INNER_OUT, VOCAB, WeightShard, heads_out
from .decoder import DecoderModel, DecoderStack, Embedding, LmHead


def read_llama(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of a dense Llama, Mistral, Qwen2 or Qwen3 and build its layers."""
    layers = (read_layer(config, weights, f"model.layers.{i}", i) for i in range(config.num_layers))
    return read_model(config, weights, layers)


def read_model(config: ModelConfig, weights: Weights, layers: Iterable[DecoderLayer]) -> DecoderModel:
    """Read a model with the given layers over one residual stream."""
    embedding, lm_head = read_ends(config, weights)
    stack = DecoderStack(tuple(layers), read_norm(config, weights), config.rms_norm_eps)
    return DecoderModel(weights.own(config), embedding, stack, lm_head)


def read_ends(config: ModelConfig, weights: Weights) -> tuple[Embedding, LmHead]:
    """Read the embedding and the head, which share their weight if the embeddings are tied."""
    embedding = Embedding(weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size))
    if config.tie_word_embeddings:
        return embedding, LmHead.tied(embedding, weights.ranks)
    linear = weights.linear("lm_head", config.vocab_size, config.hidden_size, bias=False, split=VOCAB)
    return embedding, LmHead(linear, weights.ranks.vocab(config.vocab_size))


def read_norm(config: ModelConfig, weights: Weights) -> Tensor:
    """Read the last norm, [hidden_size]."""
    return norm_weight(config, weights, "model.norm", config.hidden_size)


def norm_weight(config: ModelConfig, weights: Weights, name: str, size: int) -> Tensor:
    """Read the weight of the norm `name`, [size]: in the model's dtype, or in float32 with its offset."""
    if config.norm_offset is None:
        return weights.tensor(f"{name}.weight", size)
    return weights.tensor(f"{name}.weight", size, dtype=torch.float32).add_(config.norm_offset)


def read_layer(
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    index: int,
    mlp: FeedForward | None = None,
    attention: SelfAttention | None = None,
) -> DecoderLayer:
    """Read one decoder layer, which has KV in layer `index` of the pool. `mlp`, `attention`: its halves, if they are
    others than Llama's."""
    norm = norm_weight(config, weights, f"{prefix}.input_layernorm", config.hidden_size)
    return DecoderLayer(norm, read_body(config, weights, prefix, index, mlp=mlp, attention=attention))


def read_body(
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    index: int,
    *,
    in_size: int | None = None,
    mlp: FeedForward | None = None,
    attention: SelfAttention | None = None,
) -> DecoderBody:
    """Read a decoder layer without its input norm. `in_size`: width of what q, k and v read, hidden_size unless told
    otherwise. `mlp`, `attention`: its halves, if they are others than Llama's."""
    return DecoderBody(
        attention or read_attention(config, weights, f"{prefix}.self_attn", index, in_size or config.hidden_size),
        norm_weight(config, weights, f"{prefix}.post_attention_layernorm", config.hidden_size),
        mlp or read_mlp(config, weights, f"{prefix}.mlp", config.intermediate_size),
    )


def read_attention(
    config: ModelConfig, weights: Weights, prefix: str, index: int, in_size: int
) -> Attention | GatedAttention:
    """Read the projections and norms of the attention layer `prefix`."""
    q_size = config.q_size * (2 if config.has_output_gate else 1)
    sizes = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": config.kv_size, f"{prefix}.v_proj": config.kv_size}
    order, orders = None, {}
    if config.has_cut_heads:
        assert config.has_output_gate, config
        order = head_order(config, config.head_dim).to(weights.device)
    elif config.rotary_dim:
        orders = {name: head_order(config, size) for name, size in list(sizes.items())[:2]}
    if orders and config.has_output_gate:
        orders[f"{prefix}.q_proj"] = _gated_order(config)
    split = heads_out(config.num_heads, config.num_kv_heads)
    norms = wide_norms = None
    if config.qk_norm:
        q, k = (_norm(config, weights, f"{prefix}.{head}_norm", config.head_dim) for head in ("q", "k"))
        norms = HeadNorms(q if config.query_factor == 1 else q.mul_(config.query_factor), k)
    if config.has_wide_norms:
        wide_norms = WideNorms.of(
            _norm(config, weights, f"{prefix}.q_norm", config.q_size),
            _norm(config, weights, f"{prefix}.k_norm", config.kv_size),
            config.rms_norm_eps,
            weights.ranks.shard(split),
            weights.ranks.group,
        )
    sinks = read_sinks(config, weights, f"{prefix}.sinks", weights.ranks.shard(split)) if config.has_sinks else None
    attention = Attention(
        config.kv_place(index),
        weights.fused(sizes, in_size, bias=config.qkv_bias, split=split, orders=orders),
        norms,
        config.sliding_window[index],
        weights.linear(
            f"{prefix}.o_proj", config.hidden_size, config.q_size, bias=config.attention_bias, split=HEADS_IN
        ),
        wide_norms,
        sinks,
    )
    return (
        GatedAttention(attention, weights.own(config).q_size, config.head_dim, order)
        if config.has_output_gate
        else attention
    )


def read_sinks(config: ModelConfig, weights: Weights, name: str, shard: WeightShard | None) -> Tensor:
    """Read the sinks of this rank's query heads."""
    sinks = weights.tensor(name, config.num_heads, dtype=torch.float32)
    return sinks if shard is None else shard.take(sinks, 0).clone()


def head_order(config: ModelConfig, size: int) -> Tensor:
    """Return the order of `size` rows, whole heads, in which a part of each head is rotated as the whole would be."""
    assert config.rotary_dim is not None, "all of a head is rotated"
    one = torch.tensor(rotary_order(config.head_dim, config.rotary_dim))
    return (torch.arange(0, size, config.head_dim).unsqueeze(1) + one).flatten()


def _gated_order(config: ModelConfig) -> Tensor:
    """Return the order of the rows of queries and gates, of each head the query first. A gate keeps its order, because
    values do."""
    queries = head_order(config, config.q_size).view(-1, config.head_dim)  # as if there were no gates
    gates = torch.arange(config.q_size).view(-1, config.head_dim)
    before = torch.arange(0, config.q_size, config.head_dim).unsqueeze(1)  # rows of gates before a head's queries
    return torch.cat([queries + before, gates + before + config.head_dim], 1).flatten()


def _norm(config: ModelConfig, weights: Weights, name: str, size: int) -> Tensor:
    """Read the norm of heads, [size], in the order of their rows."""
    weight = norm_weight(config, weights, name, size)
    return weight if config.rotary_dim is None else weight[head_order(config, size).to(weight.device)]


def read_mlp(
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    inner_size: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Mlp:
    """Read a gated feed-forward layer of `inner_size` hidden units. `names`: of its projections."""
    gate, up, down = names
    sizes = {f"{prefix}.{gate}": inner_size, f"{prefix}.{up}": inner_size}
    return Mlp(
        weights.fused(sizes, config.hidden_size, bias=config.mlp_bias, split=INNER_OUT),
        weights.linear(f"{prefix}.{down}", config.hidden_size, inner_size, bias=config.mlp_bias, split=INNER_IN),
    )
