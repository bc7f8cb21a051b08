"""How many pages a node's pools get on a GPU: what weights, graphs and working memory leave of the node's share.

A node first runs everything that service runs, over pools of a few pages, and measures how much memory that takes at
most. Then its pools are made again, with all that is left.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ...metadata.errors import ConfigError, OutOfMemory
from ...metadata.logs import size_in_words
from ..config import MEMORY_SHARE, SHARING, EngineConfig
from ..engine import Engine
from .host_memory import available_memory
from .pages import pages_in

logger = logging.getLogger(__name__)

RESERVE = 1 << 30  # bytes that torch does not count: the driver's context, code, and nodes of graphs


class Memory(NamedTuple):
    """Memory that a node has measured, in bytes. Its pools are not counted in."""

    total: int  # of the GPU
    free: int  # on the GPU, to every process
    held: int  # on the GPU by this process now: weights and buffers
    peak: int  # held at most, with working memory
    host: int | None  # available of the host, for a mirror of the pools; None: no page travels through the host


def num_pages(memory: Memory, share: float, bytes_of: Callable[[int], int]) -> int:
    """Return how many pages fit. `bytes_of` returns the bytes of pools of so many pages. Raises ConfigError with the
    numbers if fewer than three fit."""
    of_share = int(share * memory.total) - memory.peak - RESERVE
    # a node that serves beside this one may hold less at the moment than it will need; beside a larger share is none
    spared = max(RESERVE, int((1 - max(share, MEMORY_SHARE)) * memory.total))
    of_device = memory.free - (memory.peak - memory.held) - spared
    found = pages_in(min(of_share, of_device), bytes_of)
    if found < 3:
        raise ConfigError(_refusal(memory, share, bytes_of(3), spared, is_share_least=of_share <= of_device))
    if memory.host is None:
        return found
    of_host = max(3, pages_in(int(share * memory.host), bytes_of))
    if of_host < found:
        logger.warning(
            "the host's memory bounds the pools to %d of %d pages; if no page travels through the host, "
            "--transport cuda lifts this bound",
            of_host,
            found,
        )
    return min(found, of_host)


def _refusal(memory: Memory, share: float, bytes_of_pages: int, spared: int, *, is_share_least: bool) -> str:
    """Return why not even the fewest pages fit, and what to do. `spared`: bytes that are left to other processes."""
    words = f"no page of KV fits: weights, graphs and working memory take {size_in_words(memory.peak)}, and "
    reserve, total = f"{size_in_words(RESERVE)} are kept in reserve", size_in_words(memory.total)
    needed = memory.peak + RESERVE + bytes_of_pages
    if needed > memory.total:
        return (
            f"{words}{reserve}, but this GPU has {total}: it is too small for the model; use smaller --chunk-tokens or "
            "--max-running, or a larger GPU"
        )
    if is_share_least:
        return (
            f"{words}{reserve}, but memory_share {share:.2f} of this GPU is {size_in_words(share * memory.total)}; use "
            f"--memory-share {min(1.0, needed / memory.total + 0.01):.2f} or more, or smaller --chunk-tokens"
        )
    others = memory.total - memory.free - memory.held
    return (
        f"{words}{size_in_words(spared)} are left to others, but other processes and the driver hold "
        f"{size_in_words(others)} of the {total} of this GPU; {SHARING}"
    )


def rehearsal_pages(chunk_tokens: int, page_size: int) -> int:
    """Return the size of the first pools, which hold one chunk."""
    return chunk_tokens // page_size + 3


@contextmanager
def memory_to_start() -> Iterator[None]:
    """Run a part of the start. Raises ConfigError if the device has no memory for it."""
    try:
        yield
    except (torch.OutOfMemoryError, OutOfMemory):
        free, total = map(size_in_words, torch.cuda.mem_get_info())
        raise ConfigError(
            f"the GPU ran out of memory before the node could serve: {free} of {total} are free; lower "
            f"chunk_tokens or max_running (or num_pages if it is given), or {SHARING}"
        ) from None


def fit_pools(engine: Engine, config: EngineConfig, rehearse: Callable[[Engine], None]) -> None:
    """Give an engine on CUDA the pools that its share of the device allows. `rehearse` runs all that service runs
    beside chunks, and keeps nothing. Raises ConfigError if no page fits, and what `memory_to_start` waits for."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine.warm_up(config.chunk(engine.device.type))
    rehearse(engine)
    gc.collect()
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(engine.device)
    free += engine.pool_bytes
    host = None if config.transport == "cuda" else available_memory() // engine.num_nodes  # all pools travel through it
    memory = Memory(total, free, torch.cuda.memory_reserved(), peak, host)
    engine.resize(num_pages(memory, config.share, engine.bytes_of))
    torch.cuda.empty_cache()  # graphs of the rehearsal are gone now
    logger.info(
        "%s of %s: %s for weights, graphs and working memory, %s for KV of %d tokens",
        *map(size_in_words, (peak + engine.pool_bytes, total, peak, engine.pool_bytes)),
        engine.pool.num_usable * engine.pool.page_size,
    )
