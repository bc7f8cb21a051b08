"""Requests that run through the executors of a node with one rank or several, whose outputs must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pytest
from node_pair import params
from solo import Running

from baton.engine.prompts.prompts import SubmittedChunk
from baton.engine.rounds.executor import Executor
from baton.engine.rounds.rounds import Rounds
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner, PagePool
from baton.engine.work import Accepted, BatchRow, Chunk, ChunkRow, CopyPages, Tail, Tails
from baton.metadata.wire.request import SamplingParams, TokenLogprobs

NUM_SLOTS = 8
REQUESTS = (
    ([7, 8, 9, 7, 8, 9, 7, 8], params(24, num_logprobs=3)),
    (list(range(40, 63)), params(24, temperature=0.9, seed=5, num_logprobs=3)),
    ([3], params(24, temperature=0.7, seed=9, top_k=40, repetition_penalty=1.2, num_logprobs=3)),
)


class PromptWorker(Protocol):
    def submit(self, chunk: Chunk) -> SubmittedChunk: ...


@dataclass
class Output:
    """The tokens of a sequence, and the log-probabilities that came with them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_accepted: int = 0

    def take(self, sequence: Running, accepted: Accepted) -> None:
        sequence.token_ids += accepted.token_ids
        for token_id in accepted.token_ids:
            sequence.sampling.append(token_id)
        self.token_ids += accepted.token_ids
        self.logprobs += accepted.logprobs
        self.num_accepted += accepted.num_accepted


def assert_equal(ours: Sequence[Output], theirs: Sequence[Output]) -> None:
    """Check tokens exactly, and log-probabilities within the bound of float32 (DESIGN P1)."""
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    for own, other in zip(ours, theirs, strict=True):
        for a, b in zip(own.logprobs, other.logprobs, strict=True):
            assert a is not None and b is not None and a.top_ids == b.top_ids
            assert [a.logprob, *a.top_logprobs] == pytest.approx([b.logprob, *b.top_logprobs], abs=1e-4)


def start(
    prompts: PromptWorker,
    rounds: Rounds,
    pool: PagePool,
    key: int,
    request: tuple[list[int], SamplingParams],
    size: int,
) -> tuple[Running, Output]:
    """Compute a prompt in chunks of `size`, sample its first token, and give it a slot by its metadata row."""
    ids, wanted = request
    pages = pool.allocate(-(-(len(ids) + wanted.max_tokens + 16) // pool.page_size), Owner.REQUEST)
    state = SamplingState(wanted, ids, vocab_size=rounds.executor.vocab_size)
    submitted: SubmittedChunk | None = None
    for begin in range(0, len(ids), size):
        stop = min(begin + size, len(ids))
        tails = [Tails([Tail(0, [state], [pages], CopyPages((), ()), True, 0)])] if stop == len(ids) else []
        submitted = prompts.submit(Chunk([ChunkRow(key, ids, BatchRow(ids[begin:stop], begin, pages))], tails))
        submitted.draft()
    assert submitted is not None
    [tails] = submitted.tails
    [first], [rows] = tails.first_tokens(), tails.wait_rows()
    assert first.token_ids[0] is not None
    state.append(first.token_ids[0])
    sequence = Running(len(ids), [*ids, first.token_ids[0]], len(ids), pages, state)
    rounds.admit(sequence, rows.rows[0])
    return sequence, Output(list(first.token_ids), list(first.logprobs))  # type: ignore[arg-type]


def serve(
    prompts: PromptWorker, executor: Executor, pool: PagePool, *, chunk: int, steps: Sequence[int]
) -> list[Output]:
    """Run all requests. A request joins every second round, and rounds have `steps` in turn."""
    rounds, outputs = Rounds(executor), list[Output]()
    running: list[tuple[Running, Output]] = []
    waiting, num_rounds = list(enumerate(REQUESTS)), 0
    while waiting or running:
        if waiting and num_rounds % 2 == 0:
            key, request = waiting.pop(0)
            running.append(start(prompts, rounds, pool, key, request, chunk))
            outputs.append(running[-1][1])
        num_steps = steps[num_rounds % len(steps)]
        shape = rounds.shape.with_steps(num_steps)
        result = rounds.run([each for each, _ in running], shape, [num_steps] * len(running))
        for (sequence, output), accepted in zip(running, result.rows, strict=True):
            assert accepted is not None
            output.take(sequence, accepted)
        for sequence, output in running:
            if len(output.token_ids) >= sequence.sampling.params.max_tokens:
                rounds.release(sequence)
                pool.release(sequence.pages)
        running = [each for each in running if each[0].slot is not None]
        num_rounds += 1
    return outputs
