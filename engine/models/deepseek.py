"""DeepSeek-V2, V2-Lite, V3 and R1: multi-head latent attention."""

from __future__ import annotations

import math

from ..config_file import ConfigFile
from ..layers.latent_attention import LatentAttention
from ..model_config import LatentConfig, ModelConfig
from ..products.base import HEADS_IN, HEADS_OUT, Split
from ..weights import Weights
from .decoder import DecoderModel
from .family import ModelFamily
from .llama import read_layer, read_model


def read_deepseek(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Read a whole model."""
    prefixes = (f"model.layers.{i}" for i in range(config.num_layers))
    layers = (
        read_layer(config, weights, prefix, i, attention=_read_attention(config, weights, f"{prefix}.self_attn", i))
        for i, prefix in enumerate(prefixes)
    )
    return read_model(config, weights, layers)


def _read_attention(config: ModelConfig, weights: Weights, prefix: str, index: int) -> LatentAttention:
    latent = config.latent
    assert latent is not None, config
    num_heads, size = config.num_heads, config.hidden_size
    queries = num_heads * (latent.plain_dim + latent.rotary_dim)
    norm = up = None
    if latent.query_rank is None:
        sizes, split = {f"{prefix}.q_proj": queries}, Split("heads", 0, (num_heads, 1))
    else:
        sizes, split = {f"{prefix}.q_a_proj": latent.query_rank}, None
        norm = weights.tensor(f"{prefix}.q_a_layernorm.weight", latent.query_rank)
        up = weights.linear(f"{prefix}.q_b_proj", queries, latent.query_rank, bias=False, split=HEADS_OUT)
    down = weights.fused(sizes | {f"{prefix}.kv_a_proj_with_mqa": config.kv_size}, size, bias=False, split=split)
    of_heads = weights.numbers(
        f"{prefix}.kv_b_proj", num_heads * (latent.plain_dim + latent.value_dim), latent.rank, split=HEADS_OUT
    )
    key_up, value_up = of_heads.view(-1, latent.plain_dim + latent.value_dim, latent.rank).split(
        [latent.plain_dim, latent.value_dim], dim=1
    )
    return LatentAttention(
        index,
        latent,
        down,
        norm,
        up,
        weights.tensor(f"{prefix}.kv_a_layernorm.weight", latent.rank),
        key_up.contiguous(),
        value_up.transpose(1, 2).contiguous(),
        weights.linear(f"{prefix}.o_proj", size, num_heads * latent.value_dim, bias=False, split=HEADS_IN),
    )


def _read_latent(raw: ConfigFile) -> LatentConfig:
    num_heads = raw.integer("num_attention_heads")
    if raw.integer("num_key_value_heads", num_heads) != num_heads:
        raise raw.error("num_key_value_heads", f"is not served; num_attention_heads ({num_heads}) is")
    if raw.integer("first_k_dense_replace", minimum=0) < raw.integer("num_hidden_layers"):
        raise raw.error("first_k_dense_replace", "is not served; dense layers alone are")
    if raw.flag("attention_bias"):
        raise raw.error("attention_bias", "is not served; false is")
    plain_dim, rotary_dim = raw.integer("qk_nope_head_dim"), raw.integer("qk_rope_head_dim")
    if rotary_dim % 2:
        raise raw.error("qk_rope_head_dim", "is odd, and rotary embeddings turn pairs")
    return LatentConfig(
        rank=raw.integer("kv_lora_rank"),
        query_rank=None if raw.get("q_lora_rank") is None else raw.integer("q_lora_rank"),
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=raw.integer("v_head_dim"),
        is_interleaved=raw.get("rope_interleave") is None or raw.flag("rope_interleave"),
        scale=(plain_dim + rotary_dim) ** -0.5 * _score_factor(raw),
    )


def _score_factor(raw: ConfigFile) -> float:
    """Return the factor by which a stretched context scales the scores of attention."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    fields = raw.get(key) or {}
    weight = fields.get("mscale_all_dim")
    if not weight or fields.get("rope_type", fields.get("type", "default")) == "default":
        return 1.0
    factor = raw.positive(f"{key}.factor", fields.get("factor"))
    scale = 1.0 if factor <= 1 else 0.1 * raw.positive(f"{key}.mscale_all_dim", weight) * math.log(factor) + 1.0
    return scale * scale


_NEEDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace")

DEEPSEEK_V2 = ModelFamily(
    architecture="DeepseekV2ForCausalLM",
    read=read_deepseek,
    needs=_NEEDS,
    read_latent=_read_latent,
)
DEEPSEEK_V3 = ModelFamily(
    architecture="DeepseekV3ForCausalLM",
    read=read_deepseek,
    needs=_NEEDS,
    read_latent=_read_latent,
)
