"""A family's tensors are exactly those that it loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.registry import load_model, tensor_specs
from baton.metadata.errors import ModelError

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_the_tensors_are_what_transformers_writes(
    family: str, changes: dict[str, bool], checkpoint: Checkpoint
) -> None:
    model_dir = checkpoint(family, **changes)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(model_dir / "model.safetensors").items()}
    specs = tensor_specs(read_model_config(model_dir))
    assert {spec.name: spec.shape for spec in specs} == written and len(specs) == len(written)


def test_a_head_beside_a_tied_embedding_has_to_equal_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Transformers does not tie an unlike one, whatever config.json says."""
    source = checkpoint("llama", tie_word_embeddings=True)
    config, tensors = read_model_config(source), load_file(source / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    load_model(tmp_path, config, torch.float32, "cpu")
    head[3, 5] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from the embedding, but"):
        load_model(tmp_path, config, torch.float32, "cpu")


def test_an_unknown_architecture_is_refused(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("llama")
    config = dataclasses.replace(read_model_config(model_dir), architecture="OtherForCausalLM")
    with pytest.raises(ModelError, match="OtherForCausalLM is not served; Baton serves LlamaForCausalLM, "):
        load_model(model_dir, config, torch.float32, "cpu")
