"""A head in another dtype uses the target's own embedding and output matrix, and casts at both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.registry import load_model
from baton.engine.models.target_ends import ends_in


def test_ends_of_the_same_dtype_are_the_target_itself(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("llama")
    target = load_model(model, read_model_config(model), torch.float32, "cpu")
    assert ends_in(torch.float32, target) is target


def test_ends_of_another_dtype_cast(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("llama")
    target = load_model(model, read_model_config(model), torch.float32, "cpu")
    ends, ids = ends_in(torch.bfloat16, target), torch.tensor([3, 500])
    embedded = ends.embed(ids)
    assert (ends.dtype, ends.device, ends.config) == (torch.bfloat16, target.device, target.config)
    assert torch.equal(embedded, target.embed(ids).bfloat16())
    logits = ends.logits(embedded)
    assert logits.dtype == torch.float32 and torch.equal(logits, target.logits(embedded.float()))
