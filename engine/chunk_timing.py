"""Times of chunks of padding on a decode node, measured before sequences come."""

from __future__ import annotations

import time

from .executor import Executor
from .round_timing import measure_round, padding_round
from .work import BatchRow, Recompute


def padding_chunk(num_tokens: int, page_size: int) -> Recompute:
    """Return a chunk of `num_tokens` tokens that are all padding: their KV goes to page 0, which no sequence has."""
    token_ids = [0] * (num_tokens + 1)
    pages = [0] * -(-len(token_ids) // page_size)
    return Recompute([BatchRow(token_ids[:-1], 0, pages, 0)], [token_ids])


def measure_chunk(executor: Executor, num_tokens: int, page_size: int) -> float:
    """Return the seconds by which a chunk makes a round of one sequence longer, the host's part included."""
    round_s = measure_round(executor, 1, 0)
    started = time.monotonic()
    executor.submit(padding_chunk(num_tokens, page_size))
    executor.submit(padding_round(executor.num_slots, 1, executor.shape.with_steps(0)))
    executor.collect()
    return max(0.0, time.monotonic() - started - round_s)
