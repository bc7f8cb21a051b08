"""Fields of config.json: values of those that it leaves out, and names of those that have no effect on a text.

*Left out.* A configuration class of transformers writes only the fields of an inner model that differ from its
defaults: `text_config` of LLaVA-1.5 names no size. CLASS_DEFAULTS has the defaults that are alike in all releases of
transformers. Sizes of mixtures are not in it, because their published files state them.

*Without effect.* A field that is unknown is refused: it could have an effect. A field passes if a reader asked for it,
if its value switches nothing on (null, false, 0, empty), or if it is listed here or with its family (`inert` and
`fixed` of family.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..models.family import ModelFamily
from .config_file import ConfigFile, Fields

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

_BOOKKEEPING = """
    architectures auto_map base_model cache_implementation dtype finetuning_task head_dtype id2label internal_version
    is_composition is_llama_config is_qwen2_config label2id license model_name model_type model_version name_or_path
    num_labels problem_type quantization_config return_dict tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version transformers_weights trust_remote_code use_bfloat16 use_cache
"""
_LENGTHS = """
    max_model_len max_seq_len max_sequence_length model_max_length seq_len seq_length sequence_length
    tokenizer_model_max_length
"""  # of training, or of a tokenizer; max_position_embeddings is read
_TRAINING = """
    ep_size gradient_checkpointing neftune_noise_alpha pretraining_tp router_jitter_noise seq_aux
    use_gradient_checkpointing
"""
_COMPUTED_ALIKE = """
    attn_implementation chunk_size_feed_forward flash_attention flash_attn is_decoder output_attentions
    output_hidden_states output_router_logits use_flash_attention use_flash_attention_2 use_flash_attn
"""  # the same numbers, computed or returned in another way
_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping exponential_decay_length_penalty
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores penalty_alpha prefix remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens task_specific_params temperature top_k top_p typical_p
"""  # a request says them
_DRAFTING = "mtp_chained num_nextn_predict_layers"  # drafters read them
_BESIDE_A_SWITCH = "max_window_layers"  # a window that is switched on is read or refused

INERT = frozenset(
    " ".join((_BOOKKEEPING, _LENGTHS, _TRAINING, _COMPUTED_ALIKE, _GENERATION, _DRAFTING, _BESIDE_A_SWITCH)).split()
)
INERT_PATTERNS = re.compile("^_|^unsloth_|dropout|_pdrop$|loss|initializer|_token_ids?$|_token_index$")
FIXED: Mapping[str, Any] = {  # values that mean what every family computes
    "embedding_multiplier": 1.0,
    "hidden_activation": "silu",
    "is_causal": True,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}

# Rotary settings that a type does not read belong to another type. Sections of a head are of images: the positions of
# a text are alike in all.
_ROPE = """
    attention_factor beta_fast beta_slow finetuned high_freq_factor low_freq_factor max_position_embeddings
    mrope_interleaved mrope_section mscale mscale_all_dim original_max_position_embeddings rope_type truncate type
"""
ROPE_INERT = frozenset(_ROPE.split())
ROPE_FIXED: Mapping[str, Any] = {"attn_factor": 1.0, "extrapolation_factor": 1.0, "factor": 1.0}


def refuse_unknown_fields(raw: ConfigFile, family: ModelFamily) -> None:
    """Raise ModelError, naming file, field and value, for a field that no reader asked for and that could change what
    `family` computes. Call it when everything is read."""
    _refuse_others(raw, family, INERT.union(family.inert), {**FIXED, **family.fixed})
    for section in raw.sections():
        _refuse_others(section, family, ROPE_INERT, ROPE_FIXED)


def _refuse_others(fields: Fields, family: ModelFamily, inert: frozenset[str], fixed: Mapping[str, Any]) -> None:
    for key, value in sorted(fields.unread().items()):
        if key in fixed and value is not None:
            if value != fixed[key]:
                raise fields.error(key, f"is not served for {family.architecture}; {fixed[key]!r} is", value=value)
        elif value and key not in inert and not INERT_PATTERNS.search(key):
            raise fields.error(
                key,
                f"is unknown, and could change what {family.architecture} computes; "
                f"remove it from {fields.path.name} if the text does not depend on it",
            )
