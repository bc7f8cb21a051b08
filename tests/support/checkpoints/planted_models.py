"""Synthetic models of real shapes, small enough for CI."""

from __future__ import annotations

import random
from typing import Any

from synthetic import ARCHITECTURES, with_layers

_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 16384,
    "dtype": "bfloat16",
}


_SMALL_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SMALL_STACKED = {"num_local_experts": 6, "num_experts_per_tok": 2}
_SMALL_DELTA = {
    "vocab_size": 4096,  # fewer tokens have too short keys
    "head_dim": 256,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
_SMALL_PARTLY_ROTATED = {"head_dim": 128, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SMALL_LATENTS = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def small(architecture: str = "llama-3.1-8b", **fields: Any) -> dict[str, Any]:
    """Return the config.json of an architecture, made small."""
    of = ARCHITECTURES[architecture]
    kinds = {
        "num_experts": _SMALL_EXPERTS,
        "num_local_experts": _SMALL_STACKED,
        "kv_lora_rank": _SMALL_LATENTS,
        "linear_num_key_heads": _SMALL_DELTA,
        "partial_rotary_factor": _SMALL_PARTLY_ROTATED,
    }
    others = next((own for key, own in kinds.items() if key in of), {})
    return with_layers(of | _SMALL, None) | others | fields


def random_prompt(num_tokens: int, seed: int = 0, vocab_size: int = 1024) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]
