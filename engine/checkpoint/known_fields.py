"""The fields of config.json that have no effect on a text. A field that is unknown is refused: it could have one.

A field passes if a reader asked for it, if its value switches nothing on (null, false, 0, empty), or if it is listed
here or with its family (`inert` and `fixed` of family.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..models.family import ModelFamily
from .config_file import ConfigFile, Fields

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
