"""Times of chunks of padding on a decode node, measured before sequences come."""

from __future__ import annotations

import time
from dataclasses import replace

from ..rounds.executor import Executor
from ..work import BatchRow, Recompute
from .chunk_costs import ChunkCosts
from .round_timing import measure_round, padding_round

_NUM_SEQS = 16  # of a round with a chunk beside it: a larger one takes longer to measure
_LEAST_S = 1e-6  # of a chunk
_NUM_ROUNDS = 4  # the least time counts: a disturbance of it would be taken off every chunk


def measure_costs(executor: Executor, max_tokens: int, page_size: int) -> ChunkCosts:
    """Return the measured times of chunks of up to `max_tokens` tokens."""
    round_s = _least_round_s(executor, 1)

    def chunk_s(num_tokens: int) -> float:
        """A disturbance of all rounds alone may have made them longer than a round with a chunk before it."""
        return max(_LEAST_S, measure_chunk(executor, num_tokens, page_size) - round_s)

    costs = ChunkCosts.measure(chunk_s, max_tokens)
    num_seqs = min(executor.num_slots, _NUM_SEQS)
    lengths = [each for each in executor.joint_sizes.lengths(num_seqs, 0) if each <= max_tokens]
    if lengths:
        round_s = _least_round_s(executor, num_seqs)
        costs.learn_joint(
            lambda num_tokens: measure_joint(executor, num_seqs, num_tokens, page_size) - round_s, lengths
        )
    return costs


def padding_chunk(num_tokens: int, page_size: int) -> Recompute:
    """Return a chunk of `num_tokens` tokens that are all padding: their KV goes to page 0, which no sequence has."""
    token_ids = [0] * (num_tokens + 1)
    pages = [0] * -(-len(token_ids) // page_size)
    return Recompute([BatchRow(token_ids[:-1], 0, pages, 0)], [token_ids])


def measure_chunk(executor: Executor, num_tokens: int, page_size: int) -> float:
    """Return the seconds of a chunk and then a round of one sequence, the host's part included."""
    started = time.monotonic()
    executor.submit(padding_chunk(num_tokens, page_size))
    executor.submit(padding_round(executor.num_slots, 1, executor.shape.with_steps(0)))
    executor.collect()
    return time.monotonic() - started


def measure_joint(executor: Executor, num_seqs: int, num_tokens: int, page_size: int) -> float:
    """Return the seconds of a round of `num_seqs` sequences and a chunk that shares its forward, the host's part
    included."""
    started = time.monotonic()
    work = padding_round(executor.num_slots, num_seqs, executor.shape.with_steps(0))
    executor.submit(replace(work, beside=padding_chunk(num_tokens, page_size)))
    executor.collect()
    return time.monotonic() - started


def _least_round_s(executor: Executor, num_seqs: int) -> float:
    return min(measure_round(executor, num_seqs, 0) for _ in range(_NUM_ROUNDS))
