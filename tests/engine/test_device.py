"""The device of an engine, and what follows from its kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import device as devices
from baton.engine.device import choose_device, choose_dtype, kind_of
from baton.metadata.errors import ConfigError

ASKS = re.compile(r"""\bis_cuda\b|\.type\s*[!=]=\s*['"]|\bcaptures\(|torch\.cuda\.is_available""")


@pytest.mark.parametrize(
    ("asked", "device", "stored", "dtype"),
    [
        ("auto", "cpu", "bfloat16", "float32"),
        ("auto", "cuda", "bfloat16", "bfloat16"),
        ("auto", "cuda", "float32", "float32"),
        ("float16", "cpu", "bfloat16", "float16"),
        ("float32", "cuda", "bfloat16", "float32"),
    ],
)
def test_the_dtype_follows_the_device_and_the_checkpoint(asked: Any, device: str, stored: Any, dtype: str) -> None:
    assert choose_dtype(asked, torch.device(device), stored) == dtype


def test_auto_takes_cuda_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert choose_device("auto").type == expected
        assert choose_device("cpu").type == "cpu"


def test_a_device_that_torch_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_device("cuda")


def test_a_gpu_is_apart_from_the_host_and_a_cpu_is_not() -> None:
    assert kind_of(torch.device("cuda", 1)).is_apart and not kind_of(torch.device("cpu")).is_apart


def test_few_other_files_ask_for_the_kind_of_a_device() -> None:
    """What differs between devices is a field of `DeviceKind`, or a row of kernels/operations.py."""
    engine = Path(devices.__file__).parent
    lines = [
        f"{path.name}: {line.strip()}"
        for path in engine.rglob("*.py")
        if path != Path(devices.__file__)
        for line in path.read_text().splitlines()
        if ASKS.search(line) and "def " not in line
    ]
    assert len(lines) < 10, "\n".join(lines)
