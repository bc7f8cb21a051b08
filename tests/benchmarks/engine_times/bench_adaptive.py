"""Adaptive drafting at real sizes, compared with the same rounds without drafts (a part of bench_gpu.py)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from bench_sequences import CONTEXT, Running, run_rounds, start, stop

from baton.engine.engine import Engine
from baton.engine.pace.draft_length import StepChooser
from baton.engine.pace.padding import measure_round
from baton.engine.pace.step_times import StepTimes
from baton.engine.rounds.rounds import Rounds, Submitted
from baton.engine.work import MAX_MISSED
from baton.metadata.wire.request import SamplingParams

NUM_NEW = 256  # tokens a sequence, on average where they differ
NUM_TURNS = 3
_MAX_MEASURED = 16  # as a decode node


class _UnderWay(NamedTuple):
    submitted: Submitted
    started: float  # seconds


def adaptive(engine: Engine, rounds: Rounds, batch: int, params: SamplingParams) -> dict[str, Any]:
    """Return tokens per second with adaptive drafting, relative to rounds without drafts, sampled by `params`.

    Both kinds take turns on the same prompts. The first turn, in which the chooser knows nothing yet, is separate.
    """
    executor = rounds.executor
    measure = partial(measure_round, executor)
    times = StepTimes.measure(measure, min(executor.num_slots, _MAX_MEASURED), rounds.shape.choices)
    chooser = StepChooser(rounds.shape, times, executor.num_slots)
    plain: list[float] = []
    chosen: list[float] = []
    steps: Counter[int] = Counter()
    num_tokens = num_rounds = num_checked = 0
    for turn in range(1 + NUM_TURNS):
        sequences = start(engine, rounds, batch, NUM_NEW, turn, params)
        plain.append(run_rounds(rounds, sequences, rounds.shape.with_steps(0), NUM_NEW) / batch)
        num_checked += stop(engine, rounds, sequences)
        sequences = start(engine, rounds, batch, 4 * NUM_NEW, turn, params)
        for slot in _slots(sequences):
            chooser.admit(slot)
        seconds, counted = _run(rounds, chooser, sequences)
        new = sum(len(each.token_ids) - CONTEXT - 1 for each in sequences)
        chosen.append(seconds / new)
        if turn:
            steps += counted
            num_tokens, num_rounds = num_tokens + new, num_rounds + counted.total()
        num_checked += stop(engine, rounds, sequences)
    return {
        "batch": batch,
        "adaptive_first": plain[0] / chosen[0],
        "adaptive": sum(plain[1:]) / sum(chosen[1:]),
        "least": min(one / two for one, two in zip(plain[1:], chosen[1:], strict=True)),
        "tokens_a_round": num_tokens / num_rounds / batch,
        "rounds_by_steps": dict(sorted(steps.items())),
        "checked_tokens": num_checked,
    }


def _run(rounds: Rounds, chooser: StepChooser, sequences: Sequence[Running]) -> tuple[float, Counter[int]]:
    """Run rounds as a decode node does until each sequence has NUM_NEW tokens. Returns seconds, and rounds by steps."""
    slots, steps, left = _slots(sequences), Counter[int](), NUM_NEW * len(sequences)
    settled = 0.0

    def take(done: _UnderWay) -> None:
        nonlocal settled, left
        results = rounds.collect(done.submitted).rows
        now = time.perf_counter()
        num_accepted: list[int] = []
        for sequence, result in zip(sequences, results, strict=True):
            assert result is not None
            sequence.token_ids.extend(result.token_ids)
            sequence.sampling.num_generated += len(result.token_ids)
            num_accepted.append(result.num_accepted)
            left -= len(result.token_ids)
        seconds, settled = now - max(done.started, settled), now
        shape, limits = done.submitted.shape, done.submitted.limits
        if not chooser.passes_over(shape.num_steps):
            num_caught_up, kind = done.submitted.num_caught_up, done.submitted.kind
            chooser.observe(slots, shape.num_steps, limits, num_accepted, seconds, 0.0, num_caught_up, kind)

    torch.cuda.synchronize()
    begun = time.perf_counter()
    before: _UnderWay | None = None
    while left > 0:
        started = time.perf_counter()
        usable = [rounds.shape.num_steps * (each.num_missed <= MAX_MISSED) for each in sequences]
        num_steps = 0
        if not chooser.rests() and any(usable):
            num_steps = chooser.choose(slots, usable, rounds.num_missed(sequences), rounds.kind(sequences))
        shape = rounds.shape.with_steps(num_steps)
        if before is not None and rounds.reads_tokens(shape):
            take(before)
            before = None
        submitted = rounds.submit(sequences, shape, [min(num_steps, each) for each in usable])
        steps[num_steps] += 1
        if before is not None:
            take(before)
        before = _UnderWay(submitted, started)
    if before is not None:
        take(before)
    return time.perf_counter() - begun, steps


def _slots(sequences: Sequence[Running]) -> list[int]:
    return [sequence.slot for sequence in sequences if sequence.slot is not None]
