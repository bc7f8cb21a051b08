"""Times of chunks of padding on a decode node, measured before sequences come."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from .chunk_costs import ChunkCosts
from .executor import Executor
from .round_timing import measure_round, padding_round
from .work import BatchRow, Recompute

_NUM_SEQS = 16  # of a round with a chunk beside it: a larger one takes longer to measure


def measure_costs(executor: Executor, max_tokens: int, page_size: int) -> ChunkCosts:
    """Return the measured times of chunks of up to `max_tokens` tokens."""
    costs = ChunkCosts.measure(partial(measure_chunk, executor, page_size=page_size), max_tokens)
    lengths = executor.joint_sizes.lengths(min(executor.num_slots, _NUM_SEQS), 0)
    lengths = [each for each in lengths if each <= max_tokens]
    costs.learn_joint(lambda num_tokens: measure_joint(executor, num_tokens, page_size), lengths)
    return costs


def padding_chunk(num_tokens: int, page_size: int) -> Recompute:
    """Return a chunk of `num_tokens` tokens that are all padding: their KV goes to page 0, which no sequence has."""
    token_ids = [0] * (num_tokens + 1)
    pages = [0] * -(-len(token_ids) // page_size)
    return Recompute([BatchRow(token_ids[:-1], 0, pages, 0)], [token_ids])


def measure_joint(executor: Executor, num_tokens: int, page_size: int) -> float:
    """Return the seconds by which a chunk that shares a round's forward makes the round longer, the host's part
    included."""
    num_seqs = min(executor.num_slots, _NUM_SEQS)
    round_s = measure_round(executor, num_seqs, 0)
    started = time.monotonic()
    work = padding_round(executor.num_slots, num_seqs, executor.shape.with_steps(0))
    executor.submit(replace(work, beside=padding_chunk(num_tokens, page_size)))
    executor.collect()
    return max(0.0, time.monotonic() - started - round_s)


def measure_chunk(executor: Executor, num_tokens: int, page_size: int) -> float:
    """Return the seconds by which a chunk makes a round of one sequence longer, the host's part included."""
    round_s = measure_round(executor, 1, 0)
    started = time.monotonic()
    executor.submit(padding_chunk(num_tokens, page_size))
    executor.submit(padding_round(executor.num_slots, 1, executor.shape.with_steps(0)))
    executor.collect()
    return max(0.0, time.monotonic() - started - round_s)
