"""Numbers that never change, on a device: made once, so that no round and no CUDA graph spends a kernel on them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import kind_of

_made: dict[tuple[int, int, torch.device], Tensor] = {}


def counted(num: int, device: torch.device, step: int = 1) -> Tensor:
    """0, step, 2 * step ..: [num] int64. Many hold it, so nobody writes it."""
    key = (num, step, device)
    if key in _made:
        return _made[key]
    with torch.inference_mode(mode=False):
        numbers = torch.arange(0, num * step, step, device=device)
    if not (
        kind_of(device).is_apart and torch.cuda.is_current_stream_capturing()
    ):  # what a graph makes is there after it ran
        _made[key] = numbers
    return numbers
