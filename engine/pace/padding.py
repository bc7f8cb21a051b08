"""Work of padding: its times are measured before requests come, and devices prepare themselves by it.

Padding has a slot and pages of its own, so it changes no sequence and no prompt. The measured times include the host's
part.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ..prompts.executor import PromptExecutor
from ..rounds.executor import Executor
from ..sampling.state import Needs
from ..work import BatchRow, CatchUp, Chunk, ChunkRow, Recompute, Round, RoundWork
from .draft_length import DraftShape
from .step_times import ChunkCosts

_NUM_SEQS = 16  # of a round with a chunk beside it: a larger one takes longer to measure
_LEAST_S = 1e-6  # of a chunk
_NUM_ROUNDS = 4  # the least time counts: a disturbance of it would be taken off every chunk
_KEY = -1  # of a prompt of padding; no request has it
_STEP = 7919  # between token ids; a prime, so that the ids are spread over the vocabulary


def padding_round(slot: int, num_seqs: int, shape: DraftShape) -> Round:
    """Return a greedy round of `num_seqs` sequences that are all padding, which has this slot."""
    return Round(
        slots=[slot] * num_seqs,
        num_pages=[1] * num_seqs,
        changes=(),
        limits=[0] * num_seqs,
        num_missed=[0] * num_seqs,
        shape=shape,
        needs=Needs(),
        num_logprobs=[None] * num_seqs,
    )


def padding_catch_up(slot: int, num_rows: int) -> CatchUp:
    """Return catching up of one sequence that is padding, on up to `num_rows` rows."""
    return CatchUp([slot], [1], (), [0], [0], num_rows, Needs())


def padding_chunk(num_tokens: int, page_size: int) -> Recompute:
    """Return a chunk of `num_tokens` tokens that are all padding: their KV goes to page 0, which no sequence has."""
    token_ids = [0] * (num_tokens + 1)
    pages = [0] * -(-len(token_ids) // page_size)
    return Recompute([BatchRow(token_ids[:-1], 0, pages, 0, tail=())], [token_ids])


def measure_round(executor: Executor, num_seqs: int, num_steps: int) -> float:
    """Return the seconds of a round."""
    return _seconds(executor, padding_round(executor.num_slots, num_seqs, executor.shape.with_steps(num_steps)))


def measure_chunk(executor: Executor, num_tokens: int, page_size: int) -> float:
    """Return the seconds of a chunk and then a round of one sequence."""
    work = padding_round(executor.num_slots, 1, executor.shape.with_steps(0))
    return _seconds(executor, padding_chunk(num_tokens, page_size), work)


def measure_mixed(executor: Executor, num_seqs: int, num_tokens: int, page_size: int) -> float:
    """Return the seconds of a round of `num_seqs` sequences and a chunk that shares its forward."""
    work = padding_round(executor.num_slots, num_seqs, executor.shape.with_steps(0))
    return _seconds(executor, replace(work, beside=padding_chunk(num_tokens, page_size)))


def measure_costs(executor: Executor, max_tokens: int, page_size: int) -> ChunkCosts:
    """Return the measured times of chunks of up to `max_tokens` tokens on a decode node."""
    round_s = _least_round_s(executor, 1)

    def chunk_s(num_tokens: int) -> float:
        """A disturbance of all rounds alone may have made them longer than a round with a chunk before it."""
        return max(_LEAST_S, measure_chunk(executor, num_tokens, page_size) - round_s)

    costs = ChunkCosts.measure(chunk_s, max_tokens)
    num_seqs = min(executor.num_slots, _NUM_SEQS)
    lengths = [each for each in executor.mixed_sizes.lengths(num_seqs, 0) if each <= max_tokens]
    if lengths:
        round_s = _least_round_s(executor, num_seqs)
        costs.learn_mixed(
            lambda num_tokens: measure_mixed(executor, num_seqs, num_tokens, page_size) - round_s, lengths
        )
    return costs


def measure_prompt(prompts: PromptExecutor, page_size: int, num_tokens: int) -> float:
    """Return the seconds of a chunk of `num_tokens` tokens of one prompt on a prefill node. Raises OutOfMemory as
    `PromptExecutor.submit`.

    The tokens differ, since equal ones would all choose the same experts of a mixture. No prompt ends in the chunk, and
    drafters read one token beyond it."""
    token_ids = [_STEP * index % prompts.vocab_size for index in range(num_tokens + 1)]
    row = BatchRow(token_ids[:-1], 0, [0] * -(-len(token_ids) // page_size), 0, tail=())
    started = time.monotonic()
    prompts.submit(Chunk([ChunkRow(_KEY, token_ids, row, 0)], [])).wait()
    seconds = time.monotonic() - started
    prompts.forget(_KEY)
    return seconds


def _least_round_s(executor: Executor, num_seqs: int) -> float:
    return min(measure_round(executor, num_seqs, 0) for _ in range(_NUM_ROUNDS))


def _seconds(executor: Executor, *works: RoundWork) -> float:
    """Return the seconds of these works, of which the last one is a round."""
    started = time.monotonic()
    for work in works:
        executor.submit(work)
    executor.collect()
    return time.monotonic() - started
