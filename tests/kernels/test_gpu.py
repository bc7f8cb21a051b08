"""Launches that start while the kernel before still runs."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import gpu


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_few_rows_on_a_device_that_can(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for switch in ("1", "0"):
        monkeypatch.setenv("BATON_DEPENDENT_LAUNCH", switch)
        gpu._has_dependent_launch.cache_clear()
        can = capability >= (9, 0) and switch == "1"
        assert (gpu.dependent_launch(1), gpu.dependent_launch(512), gpu.dependent_launch(513)) == (can, can, False)
    monkeypatch.undo()
    gpu._has_dependent_launch.cache_clear()
