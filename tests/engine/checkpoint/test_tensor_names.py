"""A text model inside a larger one computes what transformers' own wrapper computes on text; other towers are ignored.

The checkpoints are written by transformers, tiny and random, so their names are those that the wrappers publish.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import FIELDS, TINY, make_checkpoint
from model_pools import pools_of
from node_pair import node_pairs, params
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.tensor_names import is_of_tower, layer_prefixes, text_tensors
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.metadata.errors import ModelError

IMAGE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
PATCHES = {"image_size": 8, "patch_size": 4}
BLOCKS = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
PROMPT = [7, 3, 11, 5, 9, 500, 42, 8, 15, 16, 23]


def mistral3(tied: bool) -> Any:
    return _mistral3(transformers.MistralConfig(**TINY | {"sliding_window": None, "tie_word_embeddings": tied}))


def ministral3(tied: bool) -> Any:
    more = FIELDS["ministral3"] | {"head_dim": 16, "tie_word_embeddings": tied}
    return _mistral3(transformers.Ministral3Config(**TINY | more))


def _mistral3(text: Any) -> Any:
    tied = text.tie_word_embeddings
    image = transformers.PixtralVisionConfig(**IMAGE, **PATCHES)
    config = transformers.Mistral3Config(text_config=text, vision_config=image, image_token_index=5)
    config.tie_word_embeddings = tied
    return transformers.Mistral3ForConditionalGeneration(config)


def gemma3(tied: bool) -> Any:
    text = transformers.Gemma3TextConfig(**TINY | FIELDS["gemma3_text"] | {"head_dim": 16, "tie_word_embeddings": tied})
    image = {**IMAGE, **PATCHES, "model_type": "siglip_vision_model"}
    config = transformers.Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4)
    config.tie_word_embeddings = tied
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma4(tied: bool) -> Any:
    text = transformers.Gemma4TextConfig(**TINY | FIELDS["gemma4_text"] | {"head_dim": 16, "tie_word_embeddings": tied})
    image = {**IMAGE, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16}
    audio = {**IMAGE, "subsampling_conv_channels": [4, 4], "output_proj_dims": 16}
    config = transformers.Gemma4Config(
        text_config=text, vision_config=image | {"model_type": "gemma4_vision"}, audio_config=audio, image_token_id=499
    )
    config.tie_word_embeddings = tied
    return transformers.Gemma4ForConditionalGeneration(config)


def llava(tied: bool) -> Any:
    text = transformers.LlamaConfig(**TINY | {"tie_word_embeddings": tied})
    image = transformers.CLIPVisionConfig(**IMAGE, **PATCHES, projection_dim=16)
    config = transformers.LlavaConfig(text_config=text, vision_config=image, image_token_index=5)
    config.tie_word_embeddings = tied
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_5_vl(tied: bool) -> Any:
    image = BLOCKS | {"patch_size": 4, "fullatt_block_indexes": [0]}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}  # all alike for text
    text = TINY | {"tie_word_embeddings": tied, "rope_parameters": rope}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=image, tie_word_embeddings=tied)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(tied: bool) -> Any:
    image = BLOCKS | {"patch_size": 4, "deepstack_visual_indexes": [0]}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = TINY | {"head_dim": 16, "tie_word_embeddings": tied, "rope_parameters": rope}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=image, tie_word_embeddings=tied)
    return transformers.Qwen3VLForConditionalGeneration(config)


WRAPPERS = {
    "gemma3": gemma3,
    "gemma4": gemma4,
    "mistral3": mistral3,
    "ministral3": ministral3,
    "llava": llava,
    "qwen2.5-vl": qwen2_5_vl,
    "qwen3-vl": qwen3_vl,
}


def write(name: str, directory: Path, tied: bool = False) -> tuple[Path, Any]:
    """Write a checkpoint, and return it with transformers' model of it."""
    torch.manual_seed(3)
    model = WRAPPERS[name](tied).float().eval()
    model.save_pretrained(directory)
    return directory, model


@torch.inference_mode()
def logits_of(directory: Path, ids: list[int]) -> torch.Tensor:
    """Return our logits of all positions, [num_tokens, vocab_size]."""
    config = read_model_config(directory)
    model = load_model(directory, config, torch.float32, "cpu")
    hidden = model.forward(ForwardBatch.build([BatchRow(ids, 0, [1, 2, 3, 4])], 4, "cpu"), pools_of(config, 4, 6))
    return model.logits(hidden)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_text_is_computed_as_by_the_wrapper(name: str, tied: bool, tmp_path: Path) -> None:
    directory, theirs = write(name, tmp_path / name, tied)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(directory, PROMPT), expected, atol=2e-4, rtol=2e-4)


def as_published(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json in the shape of published files: fields of the text model beside those of the whole
    (Qwen2.5-VL), or a text model without the values that its class has anyway (LLaVA)."""
    text, whole = fields.pop("text_config"), transformers.LlamaConfig().to_dict()
    if fields["model_type"] == "llava":
        inner = {key: value for key, value in text.items() if value != whole.get(key) and key != "dtype"}
        assert "vocab_size" in inner and "rms_norm_eps" not in inner and "rope_parameters" not in inner
        return fields | {"text_config": inner}
    rope = text.pop("rope_parameters")
    del text["layer_types"]
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return text | fields | {"rope_scaling": scaling, "rope_theta": rope["rope_theta"]}


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_files_of_the_published_shape_compute_the_same(name: str, tmp_path: Path) -> None:
    directory, theirs = write(name, tmp_path / name)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(as_published(fields)))
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(directory, PROMPT), expected, atol=2e-4, rtol=2e-4)


def test_a_pair_of_nodes_serves_the_wrappers_text(tmp_path: Path) -> None:
    """With the tokenizer beside it, as every served model has."""
    directory, theirs = write("mistral3", tmp_path / "mistral3")
    plain = make_checkpoint(tmp_path / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain / name, directory / name)
    with torch.inference_mode():
        expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    settings = {"page_size": 4, "chunk_tokens": 6}
    with node_pairs() as start:
        pair = start(directory, prefill=settings, decode=settings)
        pair.submit("r", PROMPT, params(12))
        assert pair.run()["r", 0].ids == expected[0, len(PROMPT) :].tolist()


def test_other_towers_are_left_out_and_that_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, _ = write("llava", tmp_path / "llava")
    caplog.set_level(logging.INFO, "baton")
    logits_of(directory, PROMPT)
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    num = sum(is_of_tower(name) for name in load_file(directory / "model.safetensors"))
    assert said == [f"{directory} holds more than a text model: {num} tensors of other parts are left out"] and num > 5


# --- a text model inside a wrapper --------------------------------------------------------------------------------


def wrap(model: Path, directory: Path, **changes: Any) -> Path:
    """Write a text model of ours as the text model of a wrapper, with one tensor of another tower."""
    directory.mkdir()
    text = json.loads((model / "config.json").read_text()) | changes
    del text["architectures"]
    config = {"architectures": ["WrapperForConditionalGeneration"], "model_type": "wrapper", "text_config": text}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {f"language_model.{name}": value for name, value in load_file(model / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.proj.weight": torch.ones(2, 2)}, directory / "model.safetensors")
    return directory


def test_the_text_of_kimi_k2_5_is_that_of_deepseek_v3(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """In the names of the published file. transformers 5.23 has the same text model, but saves it by other names."""
    model = checkpoint("deepseek_v3", first_k_dense_replace=1)
    wrapped = wrap(model, tmp_path / "wrapped", model_type="kimi_k2")
    config = json.loads((wrapped / "config.json").read_text()) | {"model_type": "kimi_k25"}
    (wrapped / "config.json").write_text(json.dumps(config))
    tensors = load_file(wrapped / "model.safetensors") | {"mm_projector.proj.0.weight": torch.ones(2, 2)}
    save_file(tensors, wrapped / "model.safetensors")
    assert read_model_config(wrapped) == read_model_config(model)
    assert torch.equal(logits_of(wrapped, PROMPT), logits_of(model, PROMPT))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "gemma3n_text"},
            r"text_config\.model_type = 'gemma3n_text' is not served; Baton serves the text",
        ),
        ({"hidden_size": None}, r"text_config\.hidden_size = None must be a whole number"),
        ({"hc_mult": -1}, r"text_config\.hc_mult = -1 must be"),
        ({"hc_mult": 4}, r"text_config\.hc_mult = 4 is not served for LlamaForCausalLM"),
    ],
)
def test_a_text_model_that_is_not_served_is_refused_by_its_key(
    changes: dict[str, Any], words: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    wrapped = wrap(checkpoint("llama"), tmp_path / "wrapped", **changes)
    with pytest.raises(ModelError, match=words):
        read_model_config(wrapped)


@pytest.mark.parametrize(
    ("outer", "inner", "ids"), [(7, 9, (7,)), ([7, 8], 9, (7, 8)), (None, 9, (9,)), ("absent", 9, (9,))]
)
def test_the_end_of_a_text_is_the_wrappers_if_it_says_one(
    outer: Any, inner: int, ids: tuple[int, ...], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """As transformers reads a checkpoint without generation_config.json."""
    wrapped = wrap(checkpoint("llama"), tmp_path / "wrapped", eos_token_id=inner)
    config = json.loads((wrapped / "config.json").read_text()) | ({} if outer == "absent" else {"eos_token_id": outer})
    (wrapped / "config.json").write_text(json.dumps(config))
    assert read_model_config(wrapped).eos_token_ids == ids
    ends = transformers.GenerationConfig.from_model_config(config).eos_token_id
    assert ids == tuple(ends if isinstance(ends, list) else [ends])


def test_a_quantized_wrapper_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The wrapper states it for the whole model."""
    wrapped = wrap(checkpoint("llama"), tmp_path / "wrapped")
    config = json.loads((wrapped / "config.json").read_text())
    (wrapped / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ModelError, match="quantization_config"):
        read_model_config(wrapped)


# --- names --------------------------------------------------------------------------------------------------------


def test_a_text_model_alone_keeps_every_name() -> None:
    names = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "anything.else"]
    assert text_tensors(names, "here") == {name: name for name in names}


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_the_text_model(stored: str, name: str) -> None:
    assert text_tensors([stored, "visual.proj.weight"], "here") == {name: stored}


@pytest.mark.parametrize("name", ["speech_tower.layers.0.weight", "language_model.other.weight", "visual_extra.weight"])
def test_a_tensor_of_an_unknown_part_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=rf"^here: {name} belongs neither to the text model nor"):
        text_tensors(["language_model.model.norm.weight", name], "here")


def test_an_unknown_tensor_in_a_layer_is_refused_as_in_any_checkpoint(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    wrapped = wrap(checkpoint("llama"), tmp_path / "wrapped")
    tensors = load_file(wrapped / "model.safetensors")
    tensors["language_model.model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, wrapped / "model.safetensors")
    with pytest.raises(ModelError, match=r"has tensors that LlamaForCausalLM does not use .*q_norm"):
        load_model(wrapped, read_model_config(wrapped), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("names", "prefixes"),
    [
        (["model.layers.10.eh_proj.weight", "model.layers.9.eh_proj.weight"], ("model.layers.9", "model.layers.10")),
        (
            ["model.mtp_layers.10.input_proj.weight", "model.mtp_layers.2.input_proj.weight"],
            ("model.mtp_layers.2", "model.mtp_layers.10"),
        ),
        (["mtp.1.e_proj.weight", "mtp.0.e_proj.weight", "mtp.0.h_proj.weight"], ("mtp.0", "mtp.1")),
        (["mtp.fc.weight", "mtp.layers.10.a.weight", "mtp.layers.9.a.weight"], ("mtp.layers.9", "mtp.layers.10")),
        (["fc.weight", "model.layers.0.self_attn.q_proj.weight"], ()),
        (["model.mtp.eh_proj.weight", "fc.e_proj.weight"], ()),
    ],
    ids=["DeepSeek", "MiMo", "streams", "Qwen", "none", "no number"],
)
def test_layers_are_ordered_by_their_numbers(names: list[str], prefixes: tuple[str, ...]) -> None:
    assert layer_prefixes(frozenset(names)) == prefixes
