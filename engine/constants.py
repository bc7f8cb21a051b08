"""Numbers that never change, on a device: made once, so that no round and no CUDA graph spends a kernel on them."""

from __future__ import annotations

import torch
from torch import Tensor

_made: dict[tuple[int, int, torch.device], Tensor] = {}


def counted(num: int, device: torch.device, step: int = 1) -> Tensor:
    """0, step, 2 * step ..: [num] int64. Many hold it, so nobody writes it."""
    key = (num, step, device)
    found = _made.get(key)
    if found is None:
        with torch.inference_mode(mode=False):
            found = torch.arange(0, num * step, step, device=device)
        if not (
            device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):  # a graph's own are set by it alone
            _made[key] = found
    return found
