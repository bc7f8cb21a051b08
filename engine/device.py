"""Kinds of devices (CPU, CUDA), as a table of the facts in which they differ.

Other modules of the engine read these facts, and do not ask for the kind. kernels/operations.py chooses the kernels of
a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..metadata.errors import ConfigError
from ..metadata.handoff.schema.hidden_layout import HiddenDtype
from .config import DtypeChoice


class DeviceKind(NamedTuple):
    """A kind of device."""

    is_apart: bool  # has memory of its own, and works while the host goes on. The host's memory for it is pinned
    dtype: HiddenDtype | None  # of a model's computation; None: the checkpoint's
    warm_up_sizes: tuple[int, ...]  # rows of a product that have kernels of their own
    num_warm_up_scores: int  # rows of logits; as many as service scores at once, if they take the device's memory


SCORED_AT_ONCE = 1024  # rows of logits
_KINDS = {
    "cpu": DeviceKind(False, "float32", (1,), 1),
    "cuda": DeviceKind(True, None, (1, 4, 8, 16, 32), SCORED_AT_ONCE),
}


def kind_of(device: torch.device) -> DeviceKind:
    """Return what follows from the kind of a device."""
    return _KINDS[device.type]


def choose_device(name: str) -> torch.device:
    """Return the device that a configuration means. Raises ConfigError if torch does not see it."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" != found:
        raise ConfigError("device cuda was asked for, but torch sees no CUDA device; use --device cpu or auto")
    return torch.device(found if name == "auto" else name)


def choose_dtype(name: DtypeChoice, device: torch.device, checkpoint_dtype: HiddenDtype) -> HiddenDtype:
    """Return the dtype of a model's computation that a configuration means."""
    return (kind_of(device).dtype or checkpoint_dtype) if name == "auto" else name
