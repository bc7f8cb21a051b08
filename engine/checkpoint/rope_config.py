"""Parameters of rotary position embeddings, as config.json states them (attention.py computes). Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of an embedding. Fields that a `rope_type` does not use keep their defaults, so that equal embeddings
    compare equal."""

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn: how far the context was stretched
    original_context_len: int = 0  # llama3, yarn: tokens of context before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations over the original context above which a frequency is left alone
    beta_slow: float = 1.0  # yarn: rotations below which a frequency is divided by `factor`
    truncate: bool = True  # yarn: round the borders between the two to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return yarn's factor for a config.json that does not name one (section 3.4 of the paper)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
