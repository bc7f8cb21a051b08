"""A head is read with its target: sizes that do not fit are refused with both values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from heads import write_head

from baton.engine.models.head_file import check_state_width, read_head, tensor_names, without_model
from baton.engine.models.read_config import read_model_config
from baton.metadata.errors import ConfigError, ModelError

Checkpoint = Callable[..., Path]


def test_a_leading_model_is_dropped_from_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    names = tensor_names(write_head(tmp_path / "head", "mtp-deepseek", checkpoint("llama")))
    assert "model.layers.2.eh_proj.weight" in names
    assert "layers.2.eh_proj.weight" in without_model(names) and len(without_model(names)) == len(names)


def test_a_head_has_streams_if_its_layer_mixes_them(checkpoint: Checkpoint, tmp_path: Path) -> None:
    one, four = checkpoint("llama"), checkpoint("hyper_llama")
    plain = read_head(write_head(tmp_path / "eagle", "eagle", one), read_model_config(one))
    wide = read_head(write_head(tmp_path / "hyper", "hyper-eagle", four), read_model_config(four))
    assert (plain.config.spec_hidden_size, wide.config.spec_hidden_size) == (64, 256)
    check_state_width(plain, read_model_config(one))
    check_state_width(wide, read_model_config(four))
    with pytest.raises(ConfigError, match=r"64 numbers \(hc_mult 1\).*256 \(hc_mult 4\)"):
        check_state_width(plain, read_model_config(four))


def test_sizes_of_another_target_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    target = read_model_config(model)
    with pytest.raises(ConfigError, match="target of hidden size 32; the target has 64"):
        read_head(write_head(tmp_path / "narrow", "eagle", model, hidden_size=32), target)
    with pytest.raises(ConfigError, match="vocabulary of 500; the target has 512"):
        read_head(write_head(tmp_path / "few", "eagle", model, vocab_size=500), target)
    with pytest.raises(ModelError, match="nowhere"):
        read_head(tmp_path / "nowhere", target)
