"""The prefill scheduler of a node whose ranks have sequences of their own: one `PrefillScheduler` per rank.

    submit --> waiting --start--> PrefillScheduler of one rank --plan--> one StepPlan, rank by rank

Requests start in the order in which they came, each on the rank that will have computed it first: all ranks compute as
many tokens per step, so the one with the fewest tokens to compute, those of the request included. A prompt must fit
into the pool of one rank, and its choices are one request.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from ..metadata.wire.node_info import RankLoad
from .request import Request
from .scheduler import PrefillScheduler, StepPlan


class RankedPrefillScheduler:
    """Owns the schedulers of all ranks, each with a prefix cache of its own, and the requests that wait for them. A
    `PromptScheduler` (parts.py)."""

    def __init__(self, ranks: Sequence[PrefillScheduler]) -> None:
        """`ranks`: one scheduler per rank, alike but for their caches."""
        assert ranks, "a node has at least one rank"
        self.ranks = list(ranks)
        self.waiting: deque[Request] = deque()

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def start(self) -> list[Request]:
        """Start waiting requests, in order, while a rank has room. Return the requests that start now."""
        started: list[Request] = []
        while self.waiting and self._start(self.waiting[0]):
            started.append(self.waiting.popleft())
        return started

    def plan(self) -> StepPlan:
        """Return what the ranks compute in this step, in the order of the ranks. An idle rank has no chunk in it."""
        return [planned for rank in self.ranks for planned in rank.plan()]

    def hand_over(self, request: Request) -> None:
        self.ranks[request.rank].hand_over(request)

    def stop(self, request: Request) -> None:
        """Compute no more of a request that has no choices left, as `PrefillScheduler.stop`."""
        if request in self.waiting:  # its rank keeps it until it is removed
            self.waiting.remove(request)
            self.ranks[request.rank].submit(request)
        self.ranks[request.rank].stop(request)

    def remove(self, request: Request) -> None:
        """Free all that the request holds, in any phase."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.ranks[request.rank].remove(request)

    def find(self, rid: str, attempt: int) -> list[Request]:
        return [request for request in self if request.rid == rid and request.attempt <= attempt]

    def num_pages(self, request: Request) -> int:
        """Return the number of pages for the prompt, which are all on one rank."""
        return self.ranks[0].num_pages(request)

    @property
    def computing(self) -> list[Request]:
        return [request for rank in self.ranks for request in rank.computing]

    @property
    def handing_over(self) -> list[Request]:
        return [request for rank in self.ranks for request in rank.handing_over]

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens still to compute, on all ranks."""
        waiting = sum(len(request.token_ids) for request in self.waiting)
        return waiting + sum(rank.num_queued_tokens for rank in self.ranks)

    @property
    def rank_loads(self) -> tuple[RankLoad, ...]:
        return tuple(
            RankLoad(rank.cache.available, len(rank.computing) + len(rank.handing_over)) for rank in self.ranks
        )

    def __iter__(self) -> Iterator[Request]:
        yield from (*self.waiting, *itertools.chain.from_iterable(self.ranks))

    def _start(self, request: Request) -> bool:
        """Start a request on the best rank that has room."""
        num_tokens = [rank.num_queued_tokens + rank.num_uncached(request) for rank in self.ranks]
        for rank in sorted(range(len(self.ranks)), key=num_tokens.__getitem__):
            request.join_rank(rank)
            if self.ranks[rank].start_now(request):
                return True
        return False
