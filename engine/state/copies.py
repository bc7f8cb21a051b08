"""Copies between the host and a CUDA device that nobody waits for: by pinned memory, in the order of the stream.

`torch.tensor(..., device="cuda")` and `tensor.cpu()` wait until the device has done all that was asked of it before,
and the host cannot prepare the next step meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import kind_of


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on `device`; itself where that is the host. A pinned one must not be written before the copy
    is done; of another one a pinned copy is made first."""
    device = torch.device(device)
    if tensor.device.type == device.type:
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Itself on the host. From a CUDA device a copy that is there after the next `recorded_event` has happened."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """Happens when the device has done all that was asked of it up to now; None where that is the case already."""
    if not kind_of(device).is_apart:
        return None
    event = torch.cuda.Event()
    event.record()
    return event
