"""How many pages a node's pools get on a GPU: what weights, graphs and working memory leave of the node's share.

A node first runs everything that service runs, over pools of a few pages, and measures how much memory that takes at
most. Then its pools are made again, with all that is left.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import psutil
import torch

from ..metadata.errors import ConfigError
from ..metadata.handoff.schema import page_bytes
from .config import MEMORY_SHARE, EngineConfig
from .engine import Engine

logger = logging.getLogger(__name__)

RESERVE = 1 << 30  # bytes that torch does not count: the driver's context, code, and nodes of graphs
_HOST_SHARE = 0.9
_GIB = 1 << 30


class Memory(NamedTuple):
    """Memory that a node has measured, in bytes. Its pools are not counted in."""

    total: int  # of the GPU
    free: int  # on the GPU, to every process
    held: int  # on the GPU by this process now: weights and buffers
    peak: int  # held at most, with working memory
    host: int  # of the host, where the pools have a mirror that takes memory only where pages travel through it


def num_pages(memory: Memory, share: float, bytes_per_page: int) -> int:
    """Return how many pages fit. Raises ConfigError with the numbers if these are fewer than three."""
    of_share = int(share * memory.total) - memory.peak
    of_device = memory.free - (memory.peak - memory.held)
    found = (min(of_share, of_device) - RESERVE) // bytes_per_page
    if found >= 3:
        return max(3, min(found, int(_HOST_SHARE * memory.host) // bytes_per_page))
    needed = memory.peak + RESERVE + 3 * bytes_per_page
    words = (
        f"no page of KV fits: weights, graphs and working memory take {memory.peak / _GIB:.1f} GiB, and "
        f"{RESERVE / _GIB:.0f} GiB are kept in reserve"
    )
    if of_share <= of_device:
        raise ConfigError(
            f"{words}, but memory_share {share:.2f} of this GPU is {share * memory.total / _GIB:.1f} GiB; use "
            f"--memory-share {min(1.0, needed / memory.total + 0.01):.2f} or more, or smaller --chunk-tokens"
        )
    others = memory.total - memory.free - memory.held
    raise ConfigError(
        f"{words}, but other processes hold {others / _GIB:.1f} of {memory.total / _GIB:.1f} GiB of this GPU; start "
        f"nodes that share a GPU with shares that sum to {MEMORY_SHARE} (two nodes: --memory-share "
        f"{MEMORY_SHARE / 2:.2f} each)"
    )


def rehearsal(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Return the configuration of the first pools, which hold one chunk."""
    return replace(config, num_pages=config.chunk(device.type) // config.page_size + 3)


def fit_pools(engine: Engine, config: EngineConfig, rehearse: Callable[[Engine], None]) -> None:
    """Give an engine on CUDA the pools that its share of the device allows. `rehearse` runs all that service runs
    beside chunks, and keeps nothing. Raises ConfigError if no page fits."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine.warm_up(config.chunk(engine.device.type))
    rehearse(engine)
    gc.collect()
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(engine.device)
    free += engine.pool_bytes
    memory = Memory(total, free, torch.cuda.memory_reserved(), peak, psutil.virtual_memory().total)
    engine.resize(num_pages(memory, config.share, page_bytes(engine.schema)))
    torch.cuda.empty_cache()  # graphs of the rehearsal are gone now
    logger.info(
        "%.1f of %.1f GiB: %.1f for weights, graphs and working memory, %.1f for KV of %d tokens",
        (peak + engine.pool_bytes) / _GIB,
        total / _GIB,
        peak / _GIB,
        engine.pool_bytes / _GIB,
        engine.pool.num_usable * engine.pool.page_size,
    )
