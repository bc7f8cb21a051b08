"""A head is read with its target: sizes that do not fit are refused with both values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from drafters import STREAM_MTP, target_of
from heads import as_speculators, write_head

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.families import FAMILIES
from baton.engine.models.head_file import _architecture, check_state_width, read_head, tensor_names, without_model
from baton.metadata.errors import ConfigError, ModelError

Checkpoint = Callable[..., Path]


def test_a_leading_model_is_dropped_from_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    names = tensor_names(write_head(tmp_path / "head", "mtp-deepseek", checkpoint("llama")))
    assert "model.layers.2.eh_proj.weight" in names
    assert "layers.2.eh_proj.weight" in without_model(names) and len(without_model(names)) == len(names)


def test_a_head_takes_states_as_wide_as_its_target_hands_over(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Both widths and both numbers of streams are in the message."""
    one, two, four = checkpoint("llama"), *(target_of(STREAM_MTP, checkpoint, hc_mult=num) for num in (2, 4))
    heads = {
        64: read_head(write_head(tmp_path / "eagle", "eagle", one), read_model_config(one)),
        128: read_head(two, read_model_config(two)),
        256: read_head(four, read_model_config(four)),
    }
    for width, head in heads.items():
        for target in map(read_model_config, (one, two, four)):
            if target.handoff_hidden_size == width:
                check_state_width(head, target)
                continue
            with pytest.raises(ConfigError) as raised:
                check_state_width(head, target)
            words = f"states of {width} numbers (hc_mult {width // 64}); the target hands over"
            assert f"{words} {target.handoff_hidden_size} (hc_mult {target.hc_mult})" in str(raised.value)


def test_a_head_of_speculators_is_read_and_other_kinds_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    target = read_model_config(model)
    head = as_speculators(write_head(tmp_path / "head", "eagle3", model))
    path = head / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"target_hidden_size": None}))  # the head's own
    found = read_head(head, target)
    assert (found.config.architecture, found.config.hidden_size) == ("LlamaForCausalLM", 64)
    for changes, words in (
        ({"speculators_model_type": "peagle"}, "speculators_model_type = 'peagle' is not served; 'eagle3' is"),
        ({"norm_before_residual": None}, "norm_before_residual is missing, and its default is not certain"),
        ({"transformer_layer_config": {}}, "transformer_layer_config.num_attention_heads = None must be a whole"),
    ):
        path.write_text(json.dumps(fields | changes))
        with pytest.raises(ModelError, match=words) as raised:
            read_head(head, target)
        assert str(raised.value).startswith(f"{path}: ")
    with pytest.raises(ModelError, match=r"architectures = \['Eagle3Speculator'\] is not served; Baton serves"):
        read_model_config(head)


def test_a_head_keeps_its_directory_settings_and_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    directory = write_head(tmp_path / "head", "eagle", model)
    head = read_head(directory, read_model_config(model))
    settings = json.loads((directory / "config.json").read_text())
    assert (head.directory, head.settings, head.names) == (directory, settings, tensor_names(directory))
    assert head.fields.integer("vocab_size", 1) == 512
    with pytest.raises(ModelError) as raised:
        head.fields.flag("vocab_size")
    assert str(raised.value) == f"{directory / 'config.json'}: vocab_size = 512 must be true or false"


def test_only_families_with_prediction_layers_of_their_own_are_read_as_themselves() -> None:
    for name, family in FAMILIES.items():
        own = name if family.read_mtp_layer is not None else "LlamaForCausalLM"
        assert _architecture({"architectures": ["Unknown", name]}) == own
    assert len({family.read_mtp_layer is None for family in FAMILIES.values()}) == 2
    for settings in ({}, {"architectures": None}, {"architectures": []}):
        assert _architecture(settings) == "LlamaForCausalLM"


def test_a_damaged_file_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    head = write_head(tmp_path / "head", "eagle3", model)
    path = head / "config.json"
    for content, words in ((b"[]", "holds a list"), (b"{", "not readable JSON"), (b"\xff", "not readable JSON")):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            read_head(head, read_model_config(model))
    path.unlink()
    with pytest.raises(ModelError, match="does not exist"):
        read_head(head, read_model_config(model))


def test_sizes_of_another_target_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    target = read_model_config(model)
    head = write_head(tmp_path / "head", "eagle", model)
    path = head / "config.json"
    settings = json.loads(path.read_text())
    for name, right, words in (
        ("hidden_size", 64, "head for a target of hidden size {}; the target has 64"),
        ("target_hidden_size", 64, "head for a target of hidden size {}; the target has 64"),
        ("vocab_size", 512, "vocabulary of {}; the target has 512"),
    ):
        for wrong in (right // 2, right - 4, right + 4, 2 * right):
            path.write_text(json.dumps(settings | {name: wrong}))
            with pytest.raises(ConfigError, match=words.format(wrong)) as raised:
                read_head(head, target)
            assert str(raised.value).startswith(str(head))
        path.write_text(json.dumps(settings | {name: right}))
        assert read_head(head, target).directory == head
    with pytest.raises(ModelError, match="nowhere"):
        read_head(tmp_path / "nowhere", target)
