"""Numbers that are made once."""

from __future__ import annotations

import torch

from baton.engine.state.constants import counted

CPU = torch.device("cpu")


def test_counted_once() -> None:
    assert counted(4, CPU).tolist() == [0, 1, 2, 3] and counted(3, CPU, 5).tolist() == [0, 5, 10]
    assert counted(4, CPU) is counted(4, CPU) and counted(4, CPU).dtype is torch.int64
    assert counted(0, CPU).shape == (0,)


def test_it_serves_in_and_out_of_inference() -> None:
    with torch.inference_mode():
        inside = counted(7, CPU)
    weight = torch.ones(7, requires_grad=True)
    (weight * inside).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == inside.tolist()
