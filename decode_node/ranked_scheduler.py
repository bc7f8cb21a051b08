"""The decode scheduler of a node with data-parallel attention: every rank decodes sequences of its own. It has one
`DecodeScheduler` per rank.

    reserve --preferred_ranks--> DecodeScheduler of one rank --plan--.
                                                                     +--> StepPlans of one shape --joined--> StepPlan
                                 DecodeScheduler of another  --plan--'

Pool, prefix cache and slots belong to a rank, so a page is known by its rank and number, and a request must fit into
the pool of one rank. Choices of one request share a rank, since they share the pages of its prompt. A rank that lacks
pages preempts a sequence of its own.

All ranks draft in the same shape, because they verify together. It is chosen once, for the sequences of all ranks. A
rank whose sequences can use no drafts takes part and accepts none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import TypeVar

from ..engine.rounds.draft_shape import NO_DRAFTS, DraftShape
from ..metadata.wire.node_info import RankLoad
from ..metadata.wire.request import Unit
from .rank_choice import RankRoom, preferred_ranks
from .scheduler import Choose, DecodeScheduler, StepPlan, Streams, narrowed
from .sequence import Sequence

_Item = TypeVar("_Item")


class RankedDecodeScheduler:
    """Owns the schedulers of all ranks, each with a prefix cache of its own. A `NodeScheduler` (parts.py)."""

    def __init__(
        self, ranks: Seq[DecodeScheduler], *, choose: Choose | None = None, rests: Callable[[], bool] | None = None
    ) -> None:
        """`ranks`: one scheduler per rank, alike but for their caches, without `choose` and `rests`, which are asked
        here for all ranks together."""
        assert ranks, "a node has at least one rank"
        self.ranks = list(ranks)
        self._choose, self._rests = choose, rests
        self._rank_of: dict[tuple[str, int], int] = {}  # of the choices of a request, by rid and attempt

    def reserve(self, sequence: Sequence) -> bool:
        """Reserve on the best rank that has room, as `DecodeScheduler.reserve`. A further choice of a request gets the
        rank of those before it, or nothing."""
        known = self._known_rank(sequence.unit)
        ranks = preferred_ranks([_room(rank, sequence) for rank in self.ranks]) if known is None else [known]
        for rank in ranks:
            sequence.join_rank(rank)
            if self.ranks[rank].reserve(sequence):
                self._rank_of[sequence.unit.rid, sequence.unit.attempt] = rank
                return True
        return False

    def start_pulled(self, unit: Unit) -> Sequence:
        return self._holder(unit).start_pulled(unit)

    def start_local(self, unit: Unit) -> Sequence:
        return self._holder(unit).start_local(unit)

    def share_computed(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        self.ranks[sequence.rank].share_computed(sequence, num_tokens)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any phase, as `DecodeScheduler.finish`."""
        self.ranks[sequence.rank].finish(sequence)
        self._forget(sequence)

    def find(self, rid: str, attempt: int, choices: tuple[int, ...] | None) -> list[Sequence]:
        return [sequence for rank in self.ranks for sequence in rank.find(rid, attempt, choices)]

    def get(self, unit: Unit) -> Sequence | None:
        rank = self._known_rank(unit)
        return None if rank is None else self.ranks[rank].get(unit)

    def __len__(self) -> int:
        return sum(map(len, self.ranks))

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain.from_iterable(self.ranks)

    @property
    def reserved(self) -> dict[Unit, Sequence]:
        return {unit: sequence for rank in self.ranks for unit, sequence in rank.reserved.items()}

    @property
    def running(self) -> list[Sequence]:
        return [sequence for rank in self.ranks for sequence in rank.running]

    @property
    def preempted(self) -> list[Sequence]:
        return [sequence for rank in self.ranks for sequence in rank.preempted]

    @property
    def is_open(self) -> bool:
        """Whether a rank may grant a reservation."""
        return any(rank.is_open for rank in self.ranks)

    @property
    def num_streams(self) -> int:
        return sum(rank.num_streams for rank in self.ranks)

    @property
    def num_queued_tokens(self) -> int:
        return sum(rank.num_queued_tokens for rank in self.ranks)

    @property
    def rank_loads(self) -> tuple[RankLoad, ...]:
        return tuple(RankLoad(rank.cache.available, len(rank.running) + len(rank.reserved)) for rank in self.ranks)

    @property
    def num_preemptions(self) -> int:
        return sum(rank.num_preemptions for rank in self.ranks)

    @property
    def num_releases(self) -> int:
        return sum(rank.num_releases for rank in self.ranks)

    def preempt(self, sequence: Sequence) -> None:
        """Take all pages from a running sequence, as `DecodeScheduler.preempt`."""
        self.ranks[sequence.rank].preempt(sequence)

    def plan(self, shape: DraftShape | None = None) -> StepPlan:
        """Return the plans of all ranks as one. `shape`: the draft shape that an earlier plan chose for this round;
        None: choose it now."""
        return joined(self.plan_ranks(shape))

    def plan_ranks(self, shape: DraftShape | None = None) -> list[StepPlan]:
        """Plan the next step of every rank, as `DecodeScheduler.plan`. All plans have one draft shape. A chunk on one
        rank delays the streams of all."""
        for rank in self.ranks:
            if rank.preempted:
                rank.resume()
        chosen, usable = self._choose_shape(shape)
        plans = [rank.plan(chosen, own, self._count_streams) for rank, own in zip(self.ranks, usable, strict=True)]
        for sequence in itertools.chain.from_iterable(plan.failed for plan in plans):
            self._forget(sequence)
        return plans

    def _choose_shape(self, chosen: DraftShape | None) -> tuple[DraftShape, list[list[int]]]:
        """Return how much all ranks draft now, and the number of drafts that each sequence of each rank can accept. If
        one rank must draft nothing, no rank drafts."""
        nothing = NO_DRAFTS, [[0] * len(rank.running) for rank in self.ranks]
        most = self.ranks[0].shape
        if most.num_steps == 0 or (chosen is None and self._rests is not None and self._rests()):
            return nothing
        usable: list[list[int]] = []
        for rank in self.ranks:
            own = rank.usable_drafts()
            if own is None:
                return nothing
            usable.append(own)
        if not any(map(any, usable)):
            return nothing
        shape = most if chosen is None else chosen
        if chosen is None and self._choose is not None:
            asked = [rank.drafting(own) for rank, own in zip(self.ranks, usable, strict=True)]
            sequences = [sequence for own, _ in asked for sequence in own]
            shape = self._choose(sequences, [num for _, nums in asked for num in nums])
        return narrowed(shape, itertools.chain.from_iterable(usable)), usable

    def _count_streams(self) -> Streams:
        ranks = [rank.streams for rank in self.ranks]
        return Streams(sum(own.num_decoding for own in ranks), any(own.is_awaited for own in ranks))

    def _forget(self, sequence: Sequence) -> None:
        """Forget the rank of a request of which no choice is left."""
        rid, attempt = sequence.unit.rid, sequence.unit.attempt
        if not any(other.unit.attempt == attempt for other in self.ranks[sequence.rank].find(rid, attempt, None)):
            self._rank_of.pop((rid, attempt), None)

    def _known_rank(self, unit: Unit) -> int | None:
        return self._rank_of.get((unit.rid, unit.attempt))

    def _holder(self, unit: Unit) -> DecodeScheduler:
        rank = self._known_rank(unit)
        assert rank is not None, unit
        return self.ranks[rank]


def joined(plans: Seq[StepPlan]) -> StepPlan:
    """Return the plans of all ranks, which have one draft shape, as one plan. Sequences say which rank they are on. The
    ranks compute their chunks at the same time, so the longest one counts."""
    chunks = [plan.chunk for plan in plans if plan.chunk is not None]
    return StepPlan(
        decoding=_all(plan.decoding for plan in plans),
        limits=_all(plan.limits for plan in plans),
        shape=plans[0].shape,
        sequences=_all(plan.sequences for plan in plans),
        rows=_all(plan.rows for plan in plans),
        chunk=max(chunks, key=lambda chunk: chunk.num_tokens, default=None),
        failed=_all(plan.failed for plan in plans),
        is_premature=any(plan.is_premature for plan in plans),
        is_overlapping=any(plan.is_overlapping for plan in plans),
    )


def _all(parts: Iterable[list[_Item]]) -> list[_Item]:
    return list(itertools.chain.from_iterable(parts))


def _room(rank: DecodeScheduler, sequence: Sequence) -> RankRoom:
    return RankRoom(rank.num_cached_pages(sequence), len(rank.running) + len(rank.reserved), rank.cache.available)
