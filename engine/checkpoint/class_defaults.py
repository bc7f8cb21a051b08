"""Values of fields that config.json leaves out, as the configuration classes of transformers have them.

A class writes only the fields of an inner model that differ from its defaults: `text_config` of LLaVA-1.5 names no
size. The table has the defaults that are alike in all releases of transformers. Sizes of mixtures are not in it,
because their published files state them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
_QWEN_VL = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}
_QWEN3_5 = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # by model_type
    "gemma3_text": _GEMMA
    | {"vocab_size": 262208, "num_hidden_layers": 26, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    "gemma4_text": _GEMMA
    | {
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "ministral3": {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral4": {"bos_token_id": 1, "eos_token_id": 2},
    "qwen2": _QWEN2,
    "qwen3_5_moe_text": _QWEN3_5 | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2},
    "qwen3_5_text": _QWEN3_5
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4},
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_vl_text": {**_QWEN2, "head_dim": 128, "max_position_embeddings": 128000, "sliding_window": None},
}
THETAS: Mapping[str, float | None] = {  # rope_theta, if it is not 10,000; None: the file must say it
    "gemma3_text": 1e6,
    "gemma4_text": 1e6,
    "mimo_v2_flash": 5e6,
    "ministral3": None,
    "mistral4": None,
    "qwen2_vl_text": 1e6,
    "qwen2_5_vl_text": 1e6,
    "qwen3_vl_text": None,
}
