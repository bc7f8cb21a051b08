"""Reading of what only MiMo-V2-Flash has. Imports no torch.

Published files spell some fields in another way than transformers' class, and say things of layers with a window that
the class takes for granted.
"""

from __future__ import annotations

from typing import Any

from .config_file import ConfigFile

_KINDS = ("full_attention", "sliding_attention")
_SIZES = ("num_attention_heads", "head_dim", "v_head_dim")  # alike in layers with a window, which files say with swa_


def respell_mimo(raw: ConfigFile) -> None:
    """Name the fields as transformers' class does, with its defaults."""
    num_layers = raw.integer("num_hidden_layers")
    windowed = raw.get("hybrid_layer_pattern") or [i > 0 and (i + 1) % 6 > 0 for i in range(num_layers)]
    sparse = raw.get("moe_layer_freq") or [i > 0 for i in range(num_layers)]
    if not isinstance(windowed, list) or not isinstance(sparse, list):
        raise raw.error("hybrid_layer_pattern", "and moe_layer_freq must be lists with a number for each layer")
    fields: dict[str, Any] = {
        "layer_types": [_KINDS[bool(each)] for each in windowed],
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "rms_norm_eps": raw.number("layernorm_epsilon", 1e-5),
    }
    raw.fill(fields)
    if raw.get("sliding_window_size") is not None:  # without the query itself
        raw.replace({"sliding_window": raw.integer("sliding_window_size") + 1})
    num_kv_heads = raw.integer("num_key_value_heads")
    wanted = {name: raw.integer(name) for name in _SIZES} | {"num_key_value_heads": 2 * num_kv_heads}
    for name, size in wanted.items():
        if raw.get(f"swa_{name}") not in (None, size):
            raise raw.error(f"swa_{name}", f"is not served; {size} is")


def value_dim(raw: ConfigFile, head_dim: int) -> int | None:
    """Return the width of values; None: that of keys."""
    width = raw.integer("v_head_dim")
    if width > head_dim:
        raise raw.error("v_head_dim", f"is not served; {head_dim} (head_dim) or less is")
    return width if width < head_dim else None
