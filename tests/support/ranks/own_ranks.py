"""Sequences of ranks, each with pages, slots and block tables of its own. The test itself runs chunks and rounds.

world = OwnRanks(executor)
a, b = world.start({0: request, 1: other}, chunk=5)
world.round(3)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from solo import Running

from baton.engine.ranks.agreement import OwnWork
from baton.engine.ranks.own_work_executor import OwnWorkExecutor
from baton.engine.rounds.rounds import Rounds, Submitted
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner, PagePool
from baton.engine.work import (
    Accepted,
    BatchRow,
    Chunk,
    ChunkReport,
    ChunkRow,
    CopyPages,
    Tail,
    Tails,
)
from baton.metadata.wire.request import SamplingParams

Request = tuple[list[int], SamplingParams]


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that its rank computes."""

    key: int
    sequence: Running

    def next_chunk(self, size: int) -> Chunk | None:
        """Return the next `size` tokens; None: all are computed."""
        begin, ids = self.sequence.num_computed, self.sequence.token_ids[: self.sequence.prompt_len]
        stop = min(begin + size, len(ids))
        if begin == stop:
            return None
        self.sequence.num_computed = stop
        pages, tails = self.sequence.pages, list[Tails]()
        if stop == len(ids):
            tails = [Tails([Tail(0, [self.sequence.sampling], [pages], CopyPages((), ()), True, 0)])]
        return Chunk([ChunkRow(self.key, ids, BatchRow(ids[begin:stop], begin, pages))], tails)


class OwnRanks:
    """Owns the books of all ranks. Both ranks use the same numbers of pages and slots."""

    def __init__(self, executor: OwnWorkExecutor, *, num_pages: int = 128) -> None:
        self.executor = executor
        self.books = [Rounds(queue) for queue in executor.queues]
        page_size = executor.own.executor.engine.pool.page_size
        self.pools = [PagePool(num_pages, page_size) for _ in self.books]
        self.running: list[list[Running]] = [[] for _ in self.books]
        self.lens: set[tuple[int, ...]] = set()  # sequences of each rank in a round
        self._num_started = 0

    def start(self, requests: Mapping[int, Request], *, chunk: int = 64) -> list[Running]:
        """Compute one prompt on each rank of `requests`, in chunks of `chunk` tokens, sample the first tokens, and give
        the sequences slots. The other ranks are idle meanwhile, even if they have sequences."""
        prompts = {rank: self._prompt(rank, request) for rank, request in requests.items()}
        while True:
            works: list[OwnWork | None] = [None] * len(self.books)
            for rank, prompt in prompts.items():
                works[rank] = prompt.next_chunk(chunk)
            if not any(works):
                return [prompt.sequence for prompt in prompts.values()]
            for rank, (work, report) in enumerate(zip(works, self.executor.run(works), strict=True)):
                assert isinstance(report, ChunkReport), report
                if work is None:
                    assert not report.rows and not report.scores.logprobs, report
                elif report.rows:
                    self._admit(rank, prompts[rank].sequence, report)

    def round(self, num_steps: int, *others: int) -> None:
        """Run a round of all sequences. If the ranks want unlike numbers of steps, name the number of each."""
        self.collect(self.submit(num_steps, *others))

    def submit(self, num_steps: int, *others: int) -> dict[int, Submitted]:
        """Begin a round, as `round`. The one before may be under way, if no sequence has ended in it."""
        wanted = (num_steps, *others) if others else (num_steps,) * len(self.books)
        shape = self.books[0].shape.with_steps(max(wanted))
        submitted = {
            rank: book.submit(running, shape, [wanted[rank]] * len(running))
            for rank, (book, running) in enumerate(zip(self.books, self.running, strict=True))
            if running
        }
        self.lens.add(tuple(map(len, self.running)))
        self.executor.flush()
        return submitted

    def collect(self, submitted: Mapping[int, Submitted]) -> None:
        """Take the tokens of the oldest round that was not collected."""
        for rank, each in submitted.items():
            for sequence, accepted in zip(each.sequences, self.books[rank].collect(each).rows, strict=True):
                assert isinstance(sequence, Running) and accepted is not None
                self._take(rank, sequence, accepted)

    def run(self, *steps: int) -> None:
        """Run rounds with `steps` in turn until every sequence has ended."""
        num_rounds = 0
        while any(self.running):
            self.round(steps[num_rounds % len(steps)])
            num_rounds += 1

    def recompute(self, rank: int, sequence: Running) -> None:
        """Give the sequence other pages, and compute its KV again on its rank."""
        self.pools[rank].release(sequence.pages)
        sequence.pages = self.pools[rank].allocate(len(sequence.pages), Owner.REQUEST)
        sequence.num_missed = 0
        num = sequence.num_computed
        self.books[rank].recompute([sequence], [BatchRow(sequence.token_ids[:num], 0, sequence.pages, 0)])
        self.executor.flush()

    def _prompt(self, rank: int, request: Request) -> _Prompt:
        ids, wanted = request
        self._num_started += 1
        pool = self.pools[rank]
        pages = pool.allocate(-(-(len(ids) + wanted.max_tokens + 16) // pool.page_size), Owner.REQUEST)
        state = SamplingState(wanted, ids, vocab_size=self.executor.queues[rank].vocab_size)
        return _Prompt(self._num_started, Running(len(ids), list(ids), 0, pages, state))

    def _admit(self, rank: int, sequence: Running, report: ChunkReport) -> None:
        [[first]], [[rows]] = report.first_tokens, report.rows
        [token] = first.token_ids
        assert token is not None
        sequence.token_ids.append(token)
        sequence.sampling.append(token)
        self.books[rank].admit(sequence, rows.rows[0])
        self.running[rank].append(sequence)

    def _take(self, rank: int, sequence: Running, accepted: Accepted) -> None:
        sequence.num_accepted.append(accepted.num_accepted)
        sequence.num_computed += len(accepted.token_ids)
        for token in accepted.token_ids:
            sequence.token_ids.append(token)
            sequence.sampling.append(token)
        if len(sequence.generated) >= sequence.sampling.params.max_tokens:
            self.books[rank].release(sequence)
            self.pools[rank].release(sequence.pages)
            self.running[rank].remove(sequence)
