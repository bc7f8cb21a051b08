"""Says whether ranks with sequences of their own can serve a configuration, before any of them starts."""

from __future__ import annotations

import torch

from ..checkpoint.model_check import resolve_model
from ..config import EngineConfig
from ..device import choose_device, kind_of
from ..engine import read_target
from .devices import check_devices
from .ranks import check_shares


def check_dp_attention(config: EngineConfig) -> None:
    """Raise ConfigError if so many ranks, `config.dp_attention`, cannot divide the model, or have too few GPUs."""
    size = config.dp_attention
    if kind_of(choose_device(config.device)).is_apart:
        check_devices(size, torch.cuda.device_count(), "--dp-attention")
    model_dir = resolve_model(config.model)
    check_shares(read_target(model_dir, config), size, f"the model in {model_dir}", has_all_heads=True)
