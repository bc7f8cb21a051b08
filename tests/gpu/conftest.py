"""GPU tests: marked `gpu`, skipped with a reason where there is no CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["one-gpu", "two-gpus"])
def devices(request: pytest.FixtureRequest) -> list[int]:
    """The GPU of each of two ranks."""
    if request.param == "two-gpus" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    return [0, 1] if request.param == "two-gpus" else [0, 0]


@pytest.fixture
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of this process and of its ranks are float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
