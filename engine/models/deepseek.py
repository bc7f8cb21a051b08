"""DeepSeek-V2, V2-Lite, V3 and R1: multi-head latent attention, and mixtures of experts behind the first layers."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from ..config_file import ConfigFile
from ..layers.decoder import DecoderLayer
from ..layers.latent_attention import LatentAttention
from ..model_config import ExpertsConfig, LatentConfig, ModelConfig, Scoring
from ..products.base import HEADS_IN, HEADS_OUT, Split
from ..products.registry import plain_numbers
from ..weights import Weights
from .decoder import DecoderModel
from .family import ModelFamily
from .llama import read_layer, read_model
from .mixtures import read_deepseek_experts, read_mixture


def read_deepseek(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Read a whole model."""
    with_experts = () if config.experts is None else config.experts.layers
    layers = (
        _read_layer(config, weights, f"model.layers.{i}", i, has_experts=i in with_experts)
        for i in range(config.num_layers)
    )
    return read_model(config, weights, layers)


def _read_layer(config: ModelConfig, weights: Weights, prefix: str, index: int, *, has_experts: bool) -> DecoderLayer:
    attention = _read_attention(config, weights, f"{prefix}.self_attn", index)
    mlp = read_mixture(config, weights, f"{prefix}.mlp") if has_experts else None
    return read_layer(config, weights, prefix, index, mlp, attention)


def _read_mtp_layer(config: ModelConfig, weights: Weights, prefix: str, index: int) -> DecoderLayer:
    """Read a prediction layer, which has experts if the last layers of the model have them."""
    return _read_layer(config, weights, prefix, index, has_experts=config.experts is not None)


def _read_attention(config: ModelConfig, weights: Weights, prefix: str, index: int) -> LatentAttention:
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
    )


def _read_up(latent: LatentConfig, num_heads: int, weights: Weights, name: str) -> Tensor:
    """Return `up` of a layer. Few tokens are multiplied by it head by head, so it is plain numbers even if the
    checkpoint has it quantized."""
    size = latent.plain_dim + latent.value_dim
    source = weights.source({name: num_heads * size}, latent.rank, bias=False, split=HEADS_OUT)
    return plain_numbers(source).view(-1, size, latent.rank).contiguous()


def _read_latent(raw: ConfigFile) -> LatentConfig:
    num_heads = raw.integer("num_attention_heads")
    if raw.integer("num_key_value_heads", num_heads) != num_heads:
        raise raw.error("num_key_value_heads", f"is not served; num_attention_heads ({num_heads}) is")
    if raw.flag("attention_bias"):
        raise raw.error("attention_bias", "is not served; false is")
    plain_dim, rope_dim = raw.integer("qk_nope_head_dim"), raw.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise raw.error("qk_rope_head_dim", "is odd, and rotary embeddings turn pairs")
    return LatentConfig(
        rank=raw.integer("kv_lora_rank"),
        query_rank=None if raw.get("q_lora_rank") is None else raw.integer("q_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=raw.integer("v_head_dim"),
        is_interleaved=raw.get("rope_interleave") is None or raw.flag("rope_interleave"),
        scale=(plain_dim + rope_dim) ** -0.5 * _score_factor(raw),
    )


def _read_experts(raw: ConfigFile, scoring: Scoring) -> ExpertsConfig | None:
    """Return None if all layers are dense. `scoring`: as of `read_deepseek_experts`."""
    if raw.get("n_routed_experts") is None:
        return None
    experts = read_deepseek_experts(raw, scoring)
    return experts if experts.layers else None


def _read_v2_experts(raw: ConfigFile) -> ExpertsConfig | None:
    """Read the experts of DeepSeek-V2. norm_topk_prob is refused, because transformers ignores it for V2."""
    experts, is_ignored = _read_experts(raw, "softmax"), raw.flag("norm_topk_prob")
    if experts is not None and is_ignored:
        raise raw.error("norm_topk_prob", "is not served for DeepseekV2ForCausalLM; false is")
    return experts


def _score_factor(raw: ConfigFile) -> float:
    """Return the factor by which a stretched context scales the scores of attention."""
    fields = raw.section("rope_parameters" if raw.get("rope_parameters") else "rope_scaling")
    weight = fields.get("mscale_all_dim")
    if not weight or (fields.get("rope_type") or fields.get("type") or "default") == "default":
        return 1.0
    factor = fields.number("factor")
    scale = 1.0 if factor <= 1 else 0.1 * fields.number("mscale_all_dim") * math.log(factor) + 1.0
    return scale * scale


_INERT = ("head_dim", "qk_head_dim")  # sums of widths that are read
_NEEDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace")

DEEPSEEK_V2 = ModelFamily(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    read=read_deepseek,
    needs=_NEEDS,
    inert=(*_INERT, "n_group", "topk_group"),  # of topk_method greedy; other methods read them
    read_experts=_read_v2_experts,
    read_latent=_read_latent,
    own_mtp=(),
)
DEEPSEEK_V3 = ModelFamily(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    read=read_deepseek,
    needs=(*_NEEDS, "norm_topk_prob", "routed_scaling_factor"),
    inert=_INERT,
    read_experts=partial(_read_experts, scoring="sigmoid"),
    read_latent=_read_latent,
    read_mtp_layer=_read_mtp_layer,
    own_mtp=("model.layers.",),
)
