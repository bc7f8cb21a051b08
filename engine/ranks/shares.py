"""Whether ranks can have equal shares of a model. Imports no torch."""

from __future__ import annotations

from ...kernels.formats import BLOCK
from ...metadata.errors import ConfigError
from ..checkpoint.model_config import ModelConfig


def check_shares(config: ModelConfig, size: int, model: str, *, has_all_heads: bool = False) -> None:
    """Raise ConfigError, which calls the model `model`, if `size` ranks cannot have equal shares of its layers.
    `has_all_heads`: each rank has all heads."""
    counts = {} if has_all_heads else {"query heads": config.num_heads}
    counts["hidden units"] = config.intermediate_size
    if config.experts is not None:
        counts["hidden units of an expert"] = config.experts.inner_size
        counts["hidden units for all tokens"] = config.experts.shared_size
    if config.delta is not None and not has_all_heads:
        counts["key heads of the delta rule"] = config.delta.num_key_heads
    for what, count in counts.items():
        if count % size:
            flag = "--dp-attention" if has_all_heads else "--tp"
            raise ConfigError(f"{model} has {count} {what}, which {size} ranks cannot divide; let {flag} be a divisor")
    _check_quantization(config, size, model, has_all_heads=has_all_heads)
    for num_kv_heads in () if has_all_heads else [kind.num_kv_heads for kind in _kinds(config)]:
        if num_kv_heads % size and size % num_kv_heads:
            raise ConfigError(
                f"{model} has {num_kv_heads} KV heads, which {size} ranks cannot share; let --tp be a divisor or a "
                "multiple"
            )


def _kinds(config: ModelConfig) -> tuple[ModelConfig, ...]:
    """Return the configurations of layers whose heads may differ: with a window, and without one."""
    return (config,) if config.window is None else config.by_window()


def _check_quantization(config: ModelConfig, size: int, model: str, *, has_all_heads: bool) -> None:
    """Raise ConfigError if ranks would round other rows than one rank does."""
    quantization = config.quantization
    if quantization is None or size == 1:
        return
    if quantization.weight_scale == "blocks":
        widths = [("hidden units", config.intermediate_size // size)]
        if config.experts is not None:
            widths.append(("hidden units of an expert", config.experts.inner_size // size))
            widths.append(("hidden units for all tokens", config.experts.shared_size // size))
        for kind in () if has_all_heads else _kinds(config):
            widths.extend(_head_widths(kind, size).items())
        for what, width in widths:
            if width % BLOCK:
                raise ConfigError(
                    f"{model} has FP8 scales for blocks of {BLOCK}; {size} ranks would have {width} {what} each, which "
                    "cuts a block; use fewer ranks"
                )


def _head_widths(config: ModelConfig, size: int) -> dict[str, int]:
    """Return the numbers of heads that one of `size` ranks has, which are rows and columns of its weights."""
    latent = config.latent
    if latent is None:
        num_kv_heads, value_dim = max(1, config.num_kv_heads // size), config.value_dim or config.head_dim
        return {
            "numbers of query heads": config.q_size // size,
            "numbers of KV heads": num_kv_heads * config.head_dim,
            "numbers of values": num_kv_heads * value_dim,
            "numbers of attended values": config.num_heads // size * value_dim,
        }
    num_heads = config.num_heads // size
    return {
        "numbers of query heads": num_heads * (latent.plain_dim + latent.rope_dim),
        "numbers of keys and values": num_heads * (latent.plain_dim + latent.value_dim),
        "numbers of values": num_heads * latent.value_dim,
    }
