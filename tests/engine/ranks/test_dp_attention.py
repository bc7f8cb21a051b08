"""What ranks with sequences of their own cannot serve is refused before they start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.ranks import dp_attention, ranked_engine
from baton.engine.ranks.dp_attention import check_dp_attention
from baton.metadata.errors import ConfigError


def test_models_that_cannot_be_divided_are_refused(checkpoint: Callable[..., Path]) -> None:
    llama, mixture = str(checkpoint("llama")), str(checkpoint("qwen3_moe", intermediate_size=96))
    check_dp_attention(EngineConfig(model=llama, device="cpu", dp_attention=8))  # more ranks than heads
    with pytest.raises(ConfigError, match=rf"the model in {llama} has 128 hidden units, which 3 ranks cannot divide"):
        check_dp_attention(EngineConfig(model=llama, device="cpu", dp_attention=3))
    check_dp_attention(EngineConfig(model=mixture, device="cpu", dp_attention=3))
    with pytest.raises(ConfigError, match=rf"{mixture} has 48 hidden units of an expert, which 32 ranks cannot"):
        check_dp_attention(EngineConfig(model=mixture, device="cpu", dp_attention=32))


def test_too_few_gpus_are_refused_with_both_numbers(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dp_attention, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_dp_attention(EngineConfig(model=str(checkpoint("llama")), dp_attention=2))
    with pytest.raises(ConfigError, match=r"--dp-attention 4 needs 4 GPUs, and this node sees 2 GPUs; use .*2 or less"):
        check_dp_attention(EngineConfig(dp_attention=4))


def test_a_start_checks_first(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_engine, "RankedEngine", None)
    config = EngineConfig(model=str(checkpoint("llama")), device="cpu", dp_attention=3)
    with pytest.raises(ConfigError, match="3 ranks cannot divide; let --dp-attention be a divisor"):
        ranked_engine.start_ranks(config, num_slots=1, name="node")
