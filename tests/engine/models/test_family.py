"""A family is one value: with one line in the registry its checkpoints are read, checked and served."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.families import FAMILIES, LLAMA
from baton.engine.models.registry import load_model
from baton.metadata.errors import ModelError

Checkpoint = Callable[..., Path]


def test_a_family_is_one_value_in_the_registry(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    fields = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(fields | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ModelError, match=r"architectures = .* is not served; Baton serves LlamaForCausalLM, "):
        read_model_config(model_dir)
    other = dataclasses.replace(LLAMA, architecture="OtherForCausalLM", needs=("head_dim",))
    monkeypatch.setitem(FAMILIES, other.architecture, other)
    config = read_model_config(model_dir)
    ids = torch.tensor([3, 1])
    expected = load_model(model_dir, read_model_config(model_dir, "LlamaForCausalLM"), torch.float32, "cpu").embed(ids)
    assert torch.equal(load_model(model_dir, config, torch.float32, "cpu").embed(ids), expected)
    fields.pop("head_dim", None)
    (model_dir / "config.json").write_text(json.dumps(fields | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ModelError, match="head_dim is missing"):
        read_model_config(model_dir)
