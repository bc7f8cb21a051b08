"""Times of rounds of padding, measured before sequences come."""

from __future__ import annotations

import time

from ..rounds.draft_shape import DraftShape
from ..rounds.executor import Executor
from ..sampling.state import Needs
from ..work import CatchUp, Round


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


def measure_round(executor: Executor, num_seqs: int, num_steps: int) -> float:
    """Return the seconds of a round of padding, the host's part included."""
    started = time.monotonic()
    executor.submit(padding_round(executor.num_slots, num_seqs, executor.shape.with_steps(num_steps)))
    executor.collect()
    return time.monotonic() - started
