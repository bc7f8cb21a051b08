"""A head's tensors by name: both habits of published files, biases as the file has them, leftovers refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.models.tensors import HeadTensors
from baton.metadata.errors import ModelError

CPU = torch.device("cpu")


def head(directory: Path, **tensors: torch.Tensor) -> HeadTensors:
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    return HeadTensors(directory, torch.float32, CPU)


def test_names_with_and_without_the_prefix(tmp_path: Path) -> None:
    source = head(tmp_path, norm__weight=torch.ones(2), model__fc__weight=torch.ones(3, 2))
    assert source.has("norm.weight") and source.has("fc.weight") and not source.has("lm_head.weight")
    assert torch.equal(source.tensor("norm.weight", 2), torch.ones(2))
    assert torch.equal(source.linear("fc", 3, 2)(torch.ones(1, 2)), torch.full((1, 3), 2.0))
    source.refuse_unknown()


@pytest.mark.parametrize("prefix", ["", "model__"])
def test_a_bias_counts_if_the_file_has_one(prefix: str, tmp_path: Path) -> None:
    tensors = {f"{prefix}fc__weight": torch.ones(3, 2), f"{prefix}fc__bias": torch.arange(3.0)}
    source = head(tmp_path, **tensors)
    assert source.linear("fc", 3, 2)(torch.ones(1, 2)).tolist() == [[2.0, 3.0, 4.0]]
    source.refuse_unknown()


def test_ids_are_whole_numbers(tmp_path: Path) -> None:
    source = head(tmp_path, d2t=torch.tensor([0, 4, 7], dtype=torch.int32))
    ids = source.ids("d2t")
    assert ids.dtype == torch.int64 and ids.tolist() == [0, 4, 7]
    source.refuse_unknown()


def test_a_leftover_is_refused_unless_it_is_ignored_or_elsewhere(tmp_path: Path) -> None:
    source = head(tmp_path, model__extra__weight=torch.ones(2), fc__weight=torch.ones(3, 2))
    source.linear("fc", 3, 2)
    with pytest.raises(ModelError, match=r"no layout served here uses: model\.extra\.weight"):
        source.refuse_unknown()
    source.refuse_unknown("extra.weight")
    source.refuse_unknown(within="layers.")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source = head(tmp_path, norm__weight=torch.ones(2))
    with pytest.raises(ModelError, match=r"lacks tensors .* model\.fc\.weight"):
        source.linear("fc", 3, 2)
