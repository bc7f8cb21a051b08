"""DeepSeek-V2, V2-Lite, V3, R1 and V3.2, and GLM-5: multi-head latent attention, in some with indexers, and mixtures of
experts behind the first layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint.model_config import INDEX, LatentConfig, ModelConfig
from ..checkpoint.weights import Weights
from ..layers.decoder import DecoderLayer
from ..layers.indexer import Indexer
from ..layers.latent_attention import LatentAttention
from ..products.base import HEADS_IN, HEADS_OUT, Split
from ..products.registry import plain_numbers
from .decoder import DecoderModel
from .llama import read_layer, read_model
from .mixtures import read_mixture


def read_deepseek(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of DeepSeek-V2 or V3 and build its layers."""
    with_experts = () if config.experts is None else config.experts.layers
    layers = (
        _read_layer(config, weights, f"model.layers.{i}", i, has_experts=i in with_experts)
        for i in range(config.num_layers)
    )
    return read_model(config, weights, layers)


def _read_layer(config: ModelConfig, weights: Weights, prefix: str, index: int, *, has_experts: bool) -> DecoderLayer:
    attention = read_latent_attention(config, weights, f"{prefix}.self_attn", index)
    mlp = read_mixture(config, weights, f"{prefix}.mlp") if has_experts else None
    return read_layer(config, weights, prefix, index, mlp, attention)


def read_deepseek_mtp_layer(config: ModelConfig, weights: Weights, prefix: str, index: int) -> DecoderLayer:
    """Read a prediction layer, which has experts if the last layers of the model have them."""
    return _read_layer(config, weights, prefix, index, has_experts=config.experts is not None)


def read_latent_attention(config: ModelConfig, weights: Weights, prefix: str, index: int) -> LatentAttention:
    """Read the attention at `prefix`, whose latents are layer `index` of the pool."""
    latent = config.latent
    assert latent is not None, config
    num_heads, size = config.num_heads, config.hidden_size
    queries = num_heads * (latent.plain_dim + latent.rope_dim)
    norm = up = None
    if latent.query_rank is None:
        sizes, num_parts = {f"{prefix}.q_proj": queries}, (num_heads, 1)
    else:
        sizes, num_parts = {f"{prefix}.q_a_proj": latent.query_rank}, (1, 1)
        norm = weights.tensor(f"{prefix}.q_a_layernorm.weight", latent.query_rank)
        up = weights.linear(f"{prefix}.q_b_proj", queries, latent.query_rank, bias=False, split=HEADS_OUT)
    sizes |= {f"{prefix}.kv_a_proj_with_mqa": config.kv_size}  # whole on every rank
    down = weights.fused(sizes, size, bias=False, split=Split("heads", 0, num_parts))
    return LatentAttention(
        index,
        latent,
        down,
        norm,
        up,
        weights.tensor(f"{prefix}.kv_a_layernorm.weight", latent.rank),
        _read_up(latent, num_heads, weights, f"{prefix}.kv_b_proj"),
        weights.linear(f"{prefix}.o_proj", size, num_heads * latent.value_dim, bias=False, split=HEADS_IN),
        _read_indexer(config, latent, weights, f"{prefix}.indexer", index),
    )


def _read_indexer(
    config: ModelConfig, latent: LatentConfig, weights: Weights, prefix: str, layer: int
) -> Indexer | None:
    """Return the indexer of a layer, whole on every rank; None if the layer has none."""
    index = config.index
    place = None if index is None else config.place(INDEX, layer)
    if index is None or place is None:
        return None
    assert latent.query_rank is not None, latent
    return Indexer(
        place,
        index,
        latent.rope_dim,
        weights.linear(f"{prefix}.wq_b", index.num_heads * index.head_dim, latent.query_rank, bias=False),
        weights.linear(f"{prefix}.wk", index.head_dim, config.hidden_size, bias=False),
        (
            weights.tensor(f"{prefix}.k_norm.weight", index.head_dim),
            weights.tensor(f"{prefix}.k_norm.bias", index.head_dim),
        ),
        weights.tensor(f"{prefix}.weights_proj.weight", index.num_heads, config.hidden_size, dtype=torch.float32),
    )


def _read_up(latent: LatentConfig, num_heads: int, weights: Weights, name: str) -> Tensor:
    """Return `up` of a layer. Few tokens are multiplied by it head by head, so it is plain numbers even if the
    checkpoint has it quantized."""
    size = latent.plain_dim + latent.value_dim
    source = weights.source({name: num_heads * size}, latent.rank, bias=False, split=HEADS_OUT)
    return plain_numbers(source).view(-1, size, latent.rank).contiguous()
