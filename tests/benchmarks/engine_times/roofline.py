"""The limits of a CUDA device, as measured on it, and the least time of a step under these limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from baton.engine.checkpoint.model_config import DELTA_BLOCK, ModelConfig
from baton.engine.checkpoint.quantization import Quantization
from baton.engine.engine import Engine
from baton.kernels.experts.mxfp4 import GROUP
from baton.metadata.handoff.schema.schema import page_bytes


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


def weight_bytes(config: ModelConfig, num_tokens: int) -> tuple[int, int]:
    """Return (bytes, products): of the matrices that a step of `num_tokens` reads, all but the embedding, and the
    weights by which each token is multiplied. The experts of tokens are drawn uniformly."""
    size, experts = config.hidden_size, config.experts
    num_mixtures = 0 if experts is None else len(experts.layers)
    dense = (
        config.num_layers * config.attention_products
        + (config.num_layers - num_mixtures) * 3 * size * config.intermediate_size
    )
    read = active = 0
    if experts is not None:
        expert = 3 * size * experts.inner_size
        share = 1 - (1 - experts.num_active / experts.num_experts) ** num_tokens
        dense += num_mixtures * 3 * size * experts.shared_size
        read = num_mixtures * int(share * experts.num_experts * expert)
        active = num_mixtures * experts.num_active * expert
    head = size * config.vocab_size
    of_dense, of_expert = _number_bytes(config.quantization)
    return int(dense * of_dense + read * of_expert) + 2 * head, dense + active + head


def _number_bytes(quantization: Quantization | None) -> tuple[float, float]:
    """Return the bytes of a number of the matrices for all tokens, the head aside, and of those of experts."""
    if quantization is None:
        return 2, 2
    of_mxfp4 = 0.5 + 1 / GROUP
    if quantization.weight_scale == "mxfp4":
        return 2, of_mxfp4
    return 1, of_mxfp4 if quantization.has_mxfp4_experts else 1


def kv_read_tokens(config: ModelConfig, num_tokens: int, kv_tokens: int) -> int:
    """Return how many of `kv_tokens` a layer reads on average for `num_tokens` queries, each of a sequence of its own:
    one with a window reads no more than that for each."""
    read = [kv_tokens if window is None else min(kv_tokens, num_tokens * window) for window in config.sliding_window]
    return sum(read) // len(read)


def entry_bytes(config: ModelConfig, num_tokens: int, kv_tokens: int) -> int:
    """Return the bytes of keys, entries and index keys in 16 bits that `num_tokens` queries read in all layers. Each is
    of a sequence of its own, and `kv_tokens` are those of all sequences."""
    compressed, index, length = config.compressed, config.index, kv_tokens // max(1, num_tokens)
    assert compressed is not None, config
    rows, index_rows = 0, 0
    for kind in compressed.kinds:
        rows += min(compressed.window, length)
        if kind == "heavy":
            rows += length // compressed.heavy_rate
        elif kind == "sparse" and index is not None:
            rows += min(index.num_picks, length // compressed.sparse_rate)
            index_rows += length // compressed.sparse_rate
    return 2 * num_tokens * (rows * config.head_dim + index_rows * (0 if index is None else index.head_dim))


def state_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the bytes of recurrent states in float32, and of rows behind them in 16 bits, that `num_tokens` tokens
    move in all layers. Each is of a sequence of its own. It reads a state and the keys, values, b and a of half a block
    on average. A state is written once per block."""
    delta = config.delta
    if delta is None:
        return 0
    state = 4 * delta.num_value_heads * delta.key_dim * delta.value_dim
    row = delta.num_key_heads * delta.key_dim + delta.num_value_heads * (delta.value_dim + 1 + delta.decay_dim)
    return int(num_tokens * len(delta.layers) * (state * (1 + 1 / DELTA_BLOCK) + row * DELTA_BLOCK))


def state_flops(config: ModelConfig) -> int:
    """Return the operations of a token in all layers with a delta rule: products of a state with the key and the query,
    and the outer product that it adds."""
    delta = config.delta
    if delta is None:
        return 0
    return 3 * 2 * len(delta.layers) * delta.num_value_heads * delta.key_dim * delta.value_dim


def floor_s(engine: Engine, num_tokens: int, kv_tokens: int, limits: Limits, num_logits: int | None = None) -> float:
    """Return the least seconds of a step of `num_tokens` new tokens that reads the KV of `kv_tokens` tokens, and
    the states of as many sequences as it has new tokens."""
    config = engine.model_config
    weights, products = weight_bytes(config, num_tokens)
    if config.compressed is None:
        kv_bytes = kv_read_tokens(config, num_tokens, kv_tokens) * page_bytes(engine.schema) // engine.schema.page_size
    else:
        kv_bytes = entry_bytes(config, num_tokens, kv_tokens)
    head = config.hidden_size * config.vocab_size
    flops = 2 * num_tokens * (products - head) + 2 * (num_tokens if num_logits is None else num_logits) * head
    flops += num_tokens * state_flops(config)
    moved = weights + kv_bytes + state_bytes(config, num_tokens)
    return max(moved / limits.bytes_per_s, flops / limits.flops_per_s)
