"""The limits of a CUDA device, as measured on it, and the least time of a step under these limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from baton.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Limits:
    """The measured limits of the device."""

    bytes_per_s: float
    flops_per_s: float

    def of(self, num_devices: int) -> Limits:
        """Return the limits of so many devices together."""
        return Limits(num_devices * self.bytes_per_s, num_devices * self.flops_per_s)


def measure_limits() -> Limits:
    """Measure the best of a few streaming sums of 4 GiB, and a bf16 product of 8192^3."""
    numbers = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    read_s = best_s(numbers.sum)
    del numbers
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_s = best_s(lambda: a @ b)
    return Limits((4 << 30) / read_s, 2 * 8192**3 / product_s)


def best_s(run: Callable[[], Any], times: int = 10) -> float:
    """Return the shortest of `times` runs, by CUDA events."""
    run()
    best = float("inf")
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    return best


def weight_bytes(engine: Engine) -> tuple[int, int]:
    """Return (bytes, products) of the matrices that a decode step reads: all but the embedding."""
    config = engine.model_config
    count = config.num_layers * config.layer_products + config.hidden_size * config.vocab_size
    return 2 * count, count


def floor_s(engine: Engine, num_tokens: int, kv_tokens: int, limits: Limits, num_logits: int | None = None) -> float:
    """Return the least seconds of a step of `num_tokens` new tokens that reads the KV of `kv_tokens` tokens."""
    config = engine.model_config
    weights, products = weight_bytes(engine)
    kv_bytes = kv_tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    head = config.hidden_size * config.vocab_size
    flops = 2 * num_tokens * (products - head) + 2 * (num_tokens if num_logits is None else num_logits) * head
    return max((weights + kv_bytes) / limits.bytes_per_s, flops / limits.flops_per_s)
