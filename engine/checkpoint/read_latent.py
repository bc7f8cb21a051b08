"""Reading of the multi-head latent attention that config.json describes. Imports no torch."""

from __future__ import annotations

import math

from .config_file import ConfigFile
from .model_config import LatentConfig


def read_latent(raw: ConfigFile) -> LatentConfig:
    """Read the widths of latents and heads, and the scale of the scores."""
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


def _score_factor(raw: ConfigFile) -> float:
    """Return the factor by which a stretched context scales the scores of attention."""
    fields = raw.section("rope_parameters" if raw.get("rope_parameters") else "rope_scaling")
    weight = fields.get("mscale_all_dim")
    if not weight or (fields.get("rope_type") or fields.get("type") or "default") == "default":
        return 1.0
    factor = fields.number("factor")
    scale = 1.0 if factor <= 1 else 0.1 * fields.number("mscale_all_dim") * math.log(factor) + 1.0
    return scale * scale
