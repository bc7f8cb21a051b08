"""config.json as the four families write it, and every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published_configs import PUBLISHED, write_config
from safetensors.torch import save_file
from transformers import AutoConfig

from baton.engine.checkpoint.model_config import ModelConfig, RopeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.metadata.errors import ConfigError, ModelError

Checkpoint = Callable[..., Path]

BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN2 = BASE | {"architectures": ["Qwen2ForCausalLM"]}
MISTRAL = BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": None}


def read(tmp_path: Path, config: dict[str, object], generation: dict[str, object] | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("published", "page_size"),
    [
        *((name, 16) for name in ("Llama-2-7b", "DeepSeek-V3", "gpt-oss-20b", "Gemma-3-1B")),
        *(
            (name, 64)
            for name in ("DeepSeek-V3.2", "GLM-5.2", "Qwen3-Next-80B-A3B", "Qwen3.5-9B", "Kimi-Linear-48B-A3B")
        ),
        *((name, 128) for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro")),
    ],
)
def test_a_model_says_how_long_its_pages_are(published: str, page_size: int, tmp_path: Path) -> None:
    """Unless the operator says otherwise, which every model but DeepSeek-V4 takes."""
    config = read_model_config(write_config(tmp_path, PUBLISHED[published]))
    assert config.page_size(None) == page_size and config.page_size(256) == 256
    for asked in (0, 4097):
        with pytest.raises(ConfigError, match=f"page_size {asked} is out of range: use 1 to 4096 tokens"):
            config.page_size(asked)
    if page_size < 128:
        assert config.page_size(6) == 6
        return
    with pytest.raises(ConfigError, match=r"page_size is 6, but .* entries of 128 tokens.* use --page-size 128 or a"):
        config.page_size(6)


def test_fields_and_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, BASE | {"torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1}) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_len=256,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_word_embeddings=False,
        qkv_bias=False,
        attention_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=(None,) * 4,
        checkpoint_dtype="bfloat16",
        eos_token_ids=(2,),
        bos_token_id=1,
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_writes(checkpoint: Checkpoint, family: str) -> None:
    config = read_model_config(checkpoint(family))
    assert config.architecture.lower().startswith(family)
    assert (config.vocab_size, config.head_dim, config.num_kv_heads, config.context_len) == (512, 16, 2, 512)
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")
    assert config.eos_token_ids == (0,)


def test_eos_of_the_generation_config_wins(tmp_path: Path) -> None:
    assert read(tmp_path, BASE | {"eos_token_id": 2}, {"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)
    assert read(tmp_path, BASE | {"eos_token_id": [2, 3]}, {"temperature": 1.0}).eos_token_ids == (2, 3)
    assert read(tmp_path, BASE, {}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
    ids=["theta", "linear", "yarn"],
)
def test_both_spellings_of_rope(tmp_path: Path, old: dict[str, object], new: dict[str, object]) -> None:
    assert read(tmp_path, BASE | old | {"rope_parameters": None}) == read(tmp_path, BASE | new)


def test_an_original_length_beside_the_rotary_settings_must_agree(tmp_path: Path) -> None:
    """Families differ in which of the two counts. Without stretching it says nothing."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for length in (64, None):
        config = BASE | {"original_max_position_embeddings": length, "rope_scaling": scaling}
        assert read(tmp_path, config).rope.original_context_len == 64
    assert read(tmp_path, BASE | {"original_max_position_embeddings": 32}).rope == RopeConfig()
    with pytest.raises(ModelError, match="original_max_position_embeddings = 32 differs from that of yarn, 64"):
        read(tmp_path, BASE | {"original_max_position_embeddings": 32, "rope_scaling": scaling})


def test_two_rotary_settings_must_agree(tmp_path: Path) -> None:
    both = BASE | {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    assert read(tmp_path, both).rope == RopeConfig("linear", 1e4, 2.0)
    with pytest.raises(ModelError, match=r"rope_scaling = .* differs from rope_parameters; remove one of the two"):
        read(tmp_path, both | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    with pytest.raises(ModelError, match="rope_scaling = 'linear' differs from rope_parameters"):
        read(tmp_path, both | {"rope_scaling": "linear"})


def test_yarn_stretches_a_context_that_states_the_original(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read(tmp_path, BASE | {"rope_scaling": scaling}).context_len == 1024
    stretched = BASE | {"max_position_embeddings": 1024, "rope_scaling": scaling}
    assert read(tmp_path, stretched).context_len == 1024


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL, (None,) * 4),
        (MISTRAL | {"sliding_window": 9}, (9,) * 4),
        (QWEN2 | {"sliding_window": 9, "max_window_layers": 1}, (None,) * 4),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, (None, None, None, 9)),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 9}, (None,) * 4),
        (
            QWEN2
            | {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            },
            (9, None, None, 9),
        ),
    ],
)
def test_sliding_windows(tmp_path: Path, config: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert read(tmp_path, config).sliding_window == windows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, r"\['MixtralForCausalLM'\] is not served; Baton serves Llama"),
        ({"architectures": None}, "architectures = None is not served"),
        ({"architectures": []}, "is not served"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not served"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq' is not served"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"num_experts": 8}, "num_experts = 8.*dense"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type = 'longrope' is not served; one of default, linear"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not served"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor = None must be a positive number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor = '2' must be a positive number"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of rotary parameters"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "high_freq_factor = 4.0 must be above low_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"sliding_window": 9}, "sliding_window = 9 is not served for LlamaForCausalLM"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "must list 4 layers"),
        ({"layer_types": [{}] * 4}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads"),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
        ({"vocab_size": "512"}, "vocab_size = '512' must be a whole number"),
        ({"vocab_size": None}, "vocab_size = None must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 must be a whole number of at least 1"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1 must be a whole number of at least 0"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1 must be a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1 must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn' is not served; one of float32"),
        ({"dtype": ["float32"]}, r"dtype = \['float32'\] is not served"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>' must be a token id"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_refusals_name_the_value(tmp_path: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        read(tmp_path, BASE | change)
    assert str(tmp_path / "config.json") in str(error.value)


WITHOUT_A_CLASS = (  # transformers reads the first by code of its publisher; the second's has nothing of rotation
    "Kimi-K2",
    "Kimi-Linear-48B-A3B",
)
WITH_A_CLASS = [name for name in PUBLISHED if name not in WITHOUT_A_CLASS]


@pytest.mark.parametrize("name", WITH_A_CLASS)
def test_published_files_mean_what_transformers_takes_them_for(name: str, tmp_path: Path) -> None:
    """Whatever a file leaves out, and wherever it stands."""
    ours = read_model_config(write_config(tmp_path / "ours", PUBLISHED[name]))
    fields = {key: value for key, value in PUBLISHED[name].items() if key != "vision_config"}
    whole = AutoConfig.from_pretrained(write_config(tmp_path / "theirs", fields))
    theirs = whole.get_text_config()
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers, ours.num_heads) == (
        theirs.vocab_size,
        theirs.hidden_size,
        getattr(theirs, "intermediate_size", ours.intermediate_size),  # mixtures need not have one
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
    )
    theirs.allow_global_per_layer_attribute_access = True
    rope = theirs.rope_parameters
    if ours.window is not None:
        assert ours.window.rope.theta == rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if ours.compressed is not None:
        of_entries = ours.compressed.rope
        assert (of_entries.theta, of_entries.factor, of_entries.attention_factor) == (
            rope["compress"]["rope_theta"],
            rope["compress"]["factor"],
            rope["compress"]["attention_factor"],
        )
        rope = rope["main"]
    assert (ours.rms_norm_eps, ours.rope.theta) == (theirs.rms_norm_eps, rope["rope_theta"])
    assert ours.rope.rope_type == rope["rope_type"] and ours.rope.factor == (rope.get("factor") or 1.0)
    if ours.rope.rope_type != "yarn":  # which stretches the length of a file that states the original one
        assert ours.context_len == theirs.max_position_embeddings
    if ours.latent is None:
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        kind = ours if ours.window is None or ours.architecture.startswith("MiMo") else ours.window
        assert (kind.num_kv_heads, kind.head_dim) == (theirs.num_key_value_heads, head_dim)
    window = getattr(theirs, "sliding_window", None)
    alike = (window and "full_attention", window and "sliding_attention")[ours.architecture[:7] == "Mistral"]
    types = getattr(theirs, "layer_types", None) or [alike] * ours.num_layers
    if ours.compressed is not None:
        types = ["sliding_attention"] * ours.num_layers  # all of them see a window, whatever is behind it
    assert ours.sliding_window == tuple(window if each == "sliding_attention" else None for each in types)
    if whole.model_type != "mistral3":  # whose class says true, and whose checkpoints have a head
        assert ours.tie_word_embeddings == whole.tie_word_embeddings
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    assert ours.eos_token_ids == tuple(ends) or theirs.model_type.endswith(
        ("_vl_text", "qwen2", "gemma3_text", "gemma4_text", "mimo_v2_flash")
    )
    assert str(theirs.dtype or whole.dtype or "torch.float32") == f"torch.{ours.checkpoint_dtype}"


def test_a_file_without_a_dtype_has_that_of_its_tensors(tmp_path: Path) -> None:
    """As published files of gpt-oss. Bytes of 4-bit numbers do not count, and neither do small tensors."""
    fields = {key: value for key, value in BASE.items() if key != "dtype"}
    assert read(tmp_path, fields).checkpoint_dtype == "float32"  # no tensor is there
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        few, many = torch.ones(2, dtype=torch.float32), torch.ones(64, dtype=dtype)
        save_file({"a": few, "b": many, "c": torch.ones(999, dtype=torch.uint8)}, tmp_path / "model.safetensors")
        assert f"torch.{read(tmp_path, fields).checkpoint_dtype}" == str(dtype)
    assert read(tmp_path, fields | {"dtype": "bfloat16"}).checkpoint_dtype == "bfloat16"
    assert read_model_config(tmp_path, "LlamaForCausalLM").checkpoint_dtype == "bfloat16"


def test_a_head_in_the_checkpoint_decides_if_the_text_model_and_the_whole_differ(tmp_path: Path) -> None:
    """transformers writes `true` for every Mistral 3, whose text model has a head of its own."""
    inner = MISTRAL | {"model_type": "mistral", "tie_word_embeddings": False}
    fields = {"model_type": "mistral3", "text_config": inner, "tie_word_embeddings": True}
    other = fields | {"text_config": inner | {"tie_word_embeddings": True}, "tie_word_embeddings": False}
    for name, is_tied in (("language_model.lm_head.weight", False), ("model.language_model.norm.weight", True)):
        save_file({name: torch.ones(2)}, tmp_path / "model.safetensors")
        assert read(tmp_path, fields).tie_word_embeddings == read(tmp_path, other).tie_word_embeddings == is_tied
    del inner["tie_word_embeddings"]
    assert read(tmp_path, fields).tie_word_embeddings


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llava"}, "text_config = None must be an object: the fields of the text model"),
        ({"model_type": "llava", "text_config": None}, "text_config = None must be an object"),
        ({"model_type": "llava", "text_config": {"model_type": "gemma"}}, "model_type = 'gemma' is not served"),
        (
            {"model_type": "qwen3_vl", "text_config": {"hidden_size": 64}},
            "rope_theta = None must be a positive number",  # releases of transformers differ
        ),
        (BASE | {"rope_scaling": {"type": "mrope"}}, "rope_type = 'mrope' is not served"),
    ],
)
def test_what_no_class_says_is_not_guessed(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, fields)


def test_no_torch_is_needed() -> None:
    """`baton up` reads config.json before anything starts."""
    code = "import sys; import baton.engine.checkpoint.read_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss", "deepseek_v2")
FAMILIES += ("deepseek_v3",)
LEFT_OUT = {"architectures", "model_type", "dtype", "bos_token_id", "eos_token_id"}  # transformers' ends are examples
LEFT_OUT |= {"n_routed_experts", "n_shared_experts"}  # wrong numbers are refused when tensors are read


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_left_out_means_what_transformers_takes_it_for(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Or it is refused."""
    sizes = {"sliding_window": 7} if family == "mistral" else {}
    source = checkpoint(family, **sizes, **({"first_k_dense_replace": 1} if family[:4] in ("deep", "glm4") else {}))
    fields = json.loads((source / "config.json").read_text())
    no_choice = {"num_key_value_heads"} if family == "deepseek_v3" else set[str]()  # as many as query heads
    for key in fields.keys() - LEFT_OUT - no_choice:
        directory = tmp_path / key
        (directory / "whole").mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({name: fields[name] for name in fields if name != key}))
        try:
            ours = read_model_config(directory)
        except ModelError:
            continue
        whole = AutoConfig.from_pretrained(directory)
        whole.architectures = fields["architectures"]
        whole.save_pretrained(directory / "whole")
        assert ours == read_model_config(directory / "whole"), key


@pytest.mark.parametrize("key", ["num_key_value_heads", "sliding_window"])
def test_a_default_that_is_not_certain_is_not_guessed(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelError, match=f"{key} is missing"):
        read(tmp_path, {name: value for name, value in MISTRAL.items() if name != key})


def test_a_switched_on_window_without_size(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no sliding window is switched on"):
        read(tmp_path, QWEN2 | {"sliding_window": 9, "layer_types": ["sliding_attention"] * 4})


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config.json does not exist"):
        read_model_config(tmp_path)
    for content in (b'{"architectures": ["Llama', b"\xff\xfe\x00", b"", b"[1, 2]", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"config.json"):
            read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json is not readable JSON"):
        read_model_config(tmp_path)
