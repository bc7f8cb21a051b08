"""Sequences of the ranks of a group, each with pages, slots and block tables of its own. The test itself runs chunks
and rounds.

world = RankSequences(ranks)
a, b = world.start({0: request, 1: other}, chunk=5)
world.round(3)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from model_pools import pages_for
from solo import Running
from thread_ranks import ThreadRanks

from baton.engine.rounds.rounds import Rounds
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner, PagePool
from baton.engine.work import (
    Accepted,
    BatchRow,
    Chunk,
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
        return Chunk([ChunkRow(self.key, ids, _row(self.sequence, ids[begin:stop], begin))], tails)


class RankSequences:
    """Owns the books of all ranks. All ranks use the same numbers of pages and slots."""

    def __init__(self, ranks: ThreadRanks, *, num_pages: int = 128) -> None:
        self.ranks = ranks
        self.books = [Rounds(executor) for executor in ranks.executors]
        own = ranks.engines[0].pool
        self.pools = [PagePool(num_pages, own.page_size, num_tails=own.num_tails) for _ in self.books]
        self.running: list[list[Running]] = [[] for _ in self.books]
        self._num_started = 0

    def start(self, requests: Mapping[int, Request], *, chunk: int = 64) -> list[Running]:
        """Compute one prompt on each rank of `requests`, in chunks of `chunk` tokens, sample the first tokens, and give
        the sequences slots. The other ranks are idle meanwhile, even if they have sequences."""
        prompts = {rank: self._prompt(rank, request) for rank, request in requests.items()}
        while works := {
            rank: lambda rank=rank, work=work, prompt=prompt: self._compute(rank, prompt.sequence, work)
            for rank, prompt in prompts.items()
            if (work := prompt.next_chunk(chunk)) is not None
        }:
            self.ranks.do(works)
        return [prompt.sequence for prompt in prompts.values()]

    def round(self, num_steps: int, *others: int) -> None:
        """Run a round of all sequences. If the ranks want unlike numbers of steps, name the number of each."""
        wanted = (num_steps, *others) if others else (num_steps,) * len(self.books)
        self.ranks.do(
            {
                rank: lambda rank=rank: self._round(rank, wanted[rank])
                for rank, running in enumerate(self.running)
                if running
            }
        )

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
        rows = [_row(sequence, sequence.token_ids[: sequence.num_computed], 0, 0)]
        self.ranks.do({rank: lambda: self.books[rank].recompute([sequence], rows)})

    def _prompt(self, rank: int, request: Request) -> _Prompt:
        ids, wanted = request
        self._num_started += 1
        pages, tail = pages_for(self.pools[rank], len(ids) + wanted.max_tokens + 16)
        state = SamplingState(wanted, ids, vocab_size=self.ranks.executors[rank].vocab_size)
        return _Prompt(self._num_started, Running(len(ids), list(ids), 0, pages, state, tail=tail))

    def _compute(self, rank: int, sequence: Running, work: Chunk) -> None:
        submitted = self.ranks.prompts[rank].submit(work)
        submitted.draft()
        submitted.wait()
        for tails in submitted.tails:
            [first], [rows] = tails.first_tokens(), tails.wait_rows()
            [token] = first.token_ids
            assert token is not None
            sequence.token_ids.append(token)
            sequence.sampling.append(token)
            self.books[rank].admit(sequence, rows.rows[0])
            self.running[rank].append(sequence)

    def _round(self, rank: int, num_steps: int) -> None:
        book, running = self.books[rank], list(self.running[rank])
        submitted = book.submit(running, book.shape.with_steps(num_steps), [num_steps] * len(running))
        for sequence, accepted in zip(running, book.collect(submitted).rows, strict=True):
            assert accepted is not None
            self._take(rank, sequence, accepted)

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


def _row(sequence: Running, ids: list[int], start: int, num_logits: int = 1) -> BatchRow:
    tail = sequence.tail
    return BatchRow(ids, start, sequence.pages, num_logits, tail=None if tail is None else tail.pages)
