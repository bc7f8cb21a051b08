"""The table of defaults against the classes of transformers; published files are read, and a field that could change
the text unseen is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from published_configs import PUBLISHED
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from baton.engine.checkpoint.config_fields import (
    CLASS_DEFAULTS,
    FIXED,
    INERT,
    INERT_PATTERNS,
    ROPE_FIXED,
    ROPE_INERT,
    THETAS,
)
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.families import FAMILIES
from baton.metadata.errors import ModelError

LLAMA = PUBLISHED["Llama-3.1-8B"]
CONFIGS = {family: f"{family.removesuffix('ForCausalLM')}Config" for family in FAMILIES}
CONFIGS |= {f"Gemma{number}ForCausalLM": f"Gemma{number}TextConfig" for number in (3, 4)}
NO_DEFAULT = {  # sizes that the class leaves open, and Baton does not guess
    "Qwen3MoeForCausalLM": {"head_dim": 64},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
}


def write(directory: Path, fields: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str, tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, PUBLISHED[name])).num_layers > 0


def test_every_family_has_a_published_file(tmp_path: Path) -> None:
    published = {read_model_config(write(tmp_path, fields)).architecture for fields in PUBLISHED.values()}
    assert FAMILIES.keys() == published


@pytest.mark.parametrize("family", CONFIGS)
def test_every_field_that_transformers_writes_is_known(family: str, tmp_path: Path) -> None:
    """In memory, with every default, and as `save_pretrained` writes it."""
    config = getattr(transformers, CONFIGS[family])(architectures=[family], **NO_DEFAULT.get(family, {}))
    directory = write(tmp_path / "memory", json.loads(json.dumps(config.to_dict())))
    assert read_model_config(directory).architecture == family
    config.save_pretrained(tmp_path / "saved")
    assert read_model_config(tmp_path / "saved") == read_model_config(directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_chunk_size", 8192),
        ("attention_multiplier", 0.0078125),
        ("attn_logit_softcapping", 50.0),
        ("attn_temperature_tuning", True),
        ("clip_qkv", 8.0),
        ("embedding_multiplier", 12.0),
        ("final_logit_softcapping", 30.0),
        ("is_causal", False),
        ("layer_norm_type", "layernorm"),
        ("logits_scaling", 8.0),
        ("moe_router_activation", "sigmoid"),
        ("mup_width_multiplier", 2.0),
        ("no_rope_layers", [1, 1, 1, 0]),
        ("per_layer_config", {"0": {"num_key_value_heads": 4}}),
        ("quantization", {"bits": 4, "group_size": 64}),
        ("residual_multiplier", 0.22),
        ("rope_interleaved", True),
        ("rotary_dim", 32),
        ("use_parallel_residual", True),
        ("use_sliding_window", True),
    ],
)
def test_a_field_that_could_change_the_text_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        read_model_config(write(tmp_path, LLAMA | {key: value}))
    said = str(error.value)
    assert said.startswith(f"{tmp_path / 'config.json'}: {key} = {value!r} is ") and "LlamaForCausalLM" in said


def test_the_sentence_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        read_model_config(write(tmp_path, LLAMA | {"clip_qkv": 8.0}))
    assert str(error.value) == (
        f"{tmp_path / 'config.json'}: clip_qkv = 8.0 is unknown, and could change what LlamaForCausalLM computes; "
        "remove it from config.json if the text does not depend on it"
    )


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}], ids=repr)
def test_a_value_that_switches_nothing_on_passes(value: Any, tmp_path: Path) -> None:
    expected = read_model_config(write(tmp_path / "plain", LLAMA))
    for key in ("clip_qkv", "no_rope_layers", "use_parallel_residual"):
        assert read_model_config(write(tmp_path / key, LLAMA | {key: value})) == expected


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("MiniMax-M2", {"attn_type_list": [1, 0] * 31}, r"attn_type_list = .* is not served; 1 for every layer is"),
        ("MiniMax-M2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head' is not served for MiniMaxM2.*'per_la"),
        ("MiniMax-M2", {"use_qk_norm": False}, "use_qk_norm = False is not served for MiniMaxM2ForCausalLM; True is"),
        ("MiniMax-M2", {"shared_intermediate_size": 8}, "shared_intermediate_size = 8 is unknown"),
        ("Qwen3-30B-A3B", {"use_qk_norm": False}, "use_qk_norm = False is not served"),
        ("gpt-oss-20b", {"experts_per_token": 8}, r"experts_per_token = 8 differs from num_experts_per_tok \(4\)"),
        ("Llama-3.1-8B", {"initial_context_length": 4096}, "initial_context_length = 4096 is unknown"),
        ("Llama-3.1-8B", {"head_dim": 128, "qk_head_dim": 192}, "qk_head_dim = 192 is unknown"),
        ("Qwen3-8B", {"num_mtp_modules": 3}, "num_mtp_modules = 3 is unknown"),
    ],
)
def test_what_a_family_alone_knows(name: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read_model_config(write(tmp_path, PUBLISHED[name] | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llama_4_scaling_beta": 0.1}, r"rope_scaling\.llama_4_scaling_beta = 0.1 is unknown"),
        ({"long_factor": [1.0]}, r"rope_scaling\.long_factor = \[1.0\] is unknown"),
        ({"attn_factor": 2.0}, r"rope_scaling\.attn_factor = 2.0 is not served .* 1.0 is"),
        ({"rope_type": "default"}, r"rope_scaling\.factor = 8.0 is not served .* 1.0 is"),
    ],
)
def test_rotary_settings_that_could_change_the_text_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        read_model_config(write(tmp_path, LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | change}))


def test_rotary_settings_of_another_type_pass(tmp_path: Path) -> None:
    expected = read_model_config(write(tmp_path / "plain", LLAMA))
    for change in ({"beta_fast": 32.0}, {"attn_factor": 1.0}, {"mrope_section": [24, 20, 20]}):
        changed = LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | change}
        assert read_model_config(write(tmp_path / "other", changed)) == expected


def test_the_text_model_inside_another_is_checked_and_the_rest_is_not(tmp_path: Path) -> None:
    wrapper = PUBLISHED["Qwen3-VL-8B"]
    expected = read_model_config(write(tmp_path / "plain", wrapper))
    assert read_model_config(write(tmp_path / "wide", wrapper | {"projector_scale": 2.0})) == expected
    for key, place in (("text_multiplier", wrapper["text_config"]), ("factor", wrapper["text_config"]["rope_scaling"])):
        text = wrapper["text_config"] | (
            {key: 2.0} if key == "text_multiplier" else {"rope_scaling": place | {key: 2.0}}
        )
        with pytest.raises(ModelError, match=rf"text_config\.(rope_scaling\.)?{key} = 2.0 is "):
            read_model_config(write(tmp_path / key, wrapper | {"text_config": text}))


def test_a_draft_head_may_have_fields_of_its_own(tmp_path: Path) -> None:
    """A head changes no text, and published heads have many fields."""
    write(tmp_path, LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "draft_vocab_size": 32000})
    assert read_model_config(tmp_path, "LlamaForCausalLM").num_layers == 32


def test_no_field_is_listed_twice() -> None:
    for inert, fixed in ((INERT, FIXED), (ROPE_INERT, ROPE_FIXED)):
        assert not inert & fixed.keys()
    assert not [key for key in INERT if INERT_PATTERNS.search(key)]
    for family in FAMILIES.values():
        assert not INERT & {*family.inert, *family.fixed} and not {*family.inert} & {*family.fixed}


@pytest.mark.parametrize("model_type", CLASS_DEFAULTS)
def test_the_table_says_what_the_class_says(model_type: str) -> None:
    whole = CONFIG_MAPPING[model_type]().to_dict()
    for key, value in CLASS_DEFAULTS[model_type].items():
        if key == "sliding_window" and not whole.get("use_sliding_window", True):
            continue  # the class forgets the size of a window that is off
        assert whole.get(key) == value, key
    theta = THETAS.get(model_type, 10_000.0)
    rope = whole["rope_parameters"]
    assert theta is None or rope.get("full_attention", rope)["rope_theta"] == theta


def test_every_text_model_inside_another_has_its_defaults() -> None:
    """Files of mixtures state their sizes."""
    inner = {each for family in FAMILIES.values() if family.read_experts is None for each in family.text_types}
    assert inner <= CLASS_DEFAULTS.keys()
