"""Says whether ranks with sequences of their own can serve a configuration, before any of them starts."""

from __future__ import annotations

from ..metadata.errors import ConfigError
from .config import EngineConfig
from .engine import choose_device, resolve_model
from .models.read_config import read_model_config
from .ranks import check_shares


def check_dp_attention(config: EngineConfig) -> None:
    """Raise ConfigError if so many ranks, `config.dp_attention`, cannot divide the model, or have no device."""
    size, device = config.dp_attention, choose_device(config.device)
    if device.type != "cpu":
        raise ConfigError(
            f"--dp-attention {size} on device {device.type}: ranks with sequences of their own compute on CPUs only; "
            "use --device cpu or --dp-attention 1"
        )
    model_dir = resolve_model(config.model)
    check_shares(read_model_config(model_dir), size, f"the model in {model_dir}", has_all_heads=True)
