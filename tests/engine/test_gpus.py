"""The GPUs of a host, as nvidia-smi and the environment tell them."""

from __future__ import annotations

import pytest

from baton.engine.gpus import UsedMemory, gpu_memory, parse_used, visible_gpus


def test_a_row_that_nvidia_smi_could_not_fill_is_left_out() -> None:
    text = "00000000:1B:00.0, 1024, 143771\n00000000:43:00.0, [N/A], 143771\n"
    assert parse_used(text) == (UsedMemory("0000:1b:00.0", 1 << 30, 143771 << 20),)


def test_hidden_gpus_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == gpu_memory() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert visible_gpus() == ["1", "3"]
