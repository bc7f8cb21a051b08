"""Which sequences run in a step, and whose the pages are.

    reserve --> reserved --admit, begin--> running --finish--> (pages to the prefix cache)
                                    |     ^
                                 preempt  resume (recompute in chunks)
                                    v     |
                                   preempted

Reserved sequences hold all pages of their prompt and of two rounds, so an arrival never waits. Slots for drafts are
taken where pages are to be had; a sequence without them takes part in a round and accepts none. When pages run out for
the next token itself, the youngest running sequence is preempted; older ones always advance, so everything finishes.
While one is preempted, no new reservation is granted.

A round may be planned while the one before is under way. Then a sequence is known only up to `num_coming` tokens: pages
are found for all of them, and a sequence that certainly ends is left out. One that turns out to have ended takes part
for nothing. Nobody is preempted then; the plan says `is_premature` instead.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..engine.batch import BatchRow
from ..engine.pages import Owner
from ..engine.prefix_cache import PrefixCache
from ..engine.trees import DraftShape
from ..metadata.errors import OutOfPages
from ..metadata.handoff.needs import decode_len
from ..metadata.wire.request import Unit
from .sequence import Sequence

NO_DRAFTS = DraftShape(0)


@dataclass(slots=True)
class Plan:
    """One step: a round of the sequences that decode, chunks of those that are computed here (alone, or again after
    a preemption), and the sequences that can never go on."""

    decoding: list[Sequence] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)  # drafts that each of `decoding` may accept
    shape: DraftShape = NO_DRAFTS
    sequences: list[Sequence] = field(default_factory=list)  # of `rows`
    rows: list[BatchRow] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)
    is_premature: bool = False  # what the round under way brings must be known first, then plan again


class DecodeScheduler:
    """Owns the reserved, running and preempted sequences and all pages they hold."""

    def __init__(
        self,
        cache: PrefixCache,
        max_running: int,
        chunk_tokens: int,
        *,
        shape: DraftShape = NO_DRAFTS,
        context_len: int = 1 << 30,
        choose: Callable[[list[Sequence], list[int]], DraftShape] | None = None,
        rests: Callable[[], bool] | None = None,
        on_finish: Callable[[Sequence], None] | None = None,
    ) -> None:
        """`shape`: the most that a round drafts. `choose` says how much of it the next one drafts, for sequences and
        how many drafts each could use; None: all. `rests` says, once a round, whether that is nothing, whoever runs.
        `on_finish` is told of every sequence that is over."""
        self.cache = cache
        self.shape = shape
        self.context_len = context_len
        self._choose, self._rests = choose, rests
        self._on_finish = on_finish
        self.page_size = cache.pool.page_size
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.reserved: dict[Unit, Sequence] = {}
        self.running: list[Sequence] = []  # oldest first
        self.preempted: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_releases = 0  # how often a sequence gave its pages back

    # --- reservation and admission ---

    def reserve(self, sequence: Sequence) -> bool:
        """Take all pages of the prompt, less those cached, plus two rounds; or nothing (False)."""
        if self.preempted or len(self.running) + len(self.reserved) >= self.max_running:
            return False
        num_tokens = len(sequence.token_ids)
        if not self._take_pages(sequence, self._with_two_rounds(num_tokens), (num_tokens - 1) // self.page_size):
            return False
        self.reserved[sequence.unit] = sequence
        return True

    def admit(self, unit: Unit) -> Sequence:
        """The unit's pages have arrived, whole: it runs from now on."""
        sequence = self.reserved.pop(unit)
        sequence.num_computed = len(sequence.token_ids)
        self._cache_pages(sequence)
        bisect.insort(self.running, sequence, key=_order)
        return sequence

    def begin(self, unit: Unit) -> Sequence:
        """Nothing will arrive for the unit: it runs from now on, and what is known of it is computed here in chunks."""
        sequence = self.reserved.pop(unit)
        assert sequence.lease is not None, unit
        sequence.num_computed = sequence.num_cached = len(sequence.lease.pages) * self.page_size
        bisect.insort(self.running, sequence, key=_order)
        return sequence

    # --- one step ---

    def plan(self, shape: DraftShape | None = None) -> Plan:
        """Resume what fits, find pages for everybody (preempting the youngest), and make the rows. `shape`: what was
        chosen to draft already, by a plan that was premature; the choice is not asked for twice."""
        if not self._is_under_way:
            self._resume()
        plan = Plan(shape=self._round_shape(shape), is_premature=bool(self.preempted) and self._is_under_way)
        budget = self.chunk_tokens
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted for an older one
                continue
            if sequence.num_to_compute == 1:
                if self._ends(sequence):
                    continue
                limit = self._draft_limit(sequence, plan.shape)
                if self._grow(sequence, sequence.num_computed + sequence.num_coming + 1, plan):
                    plan.decoding.append(sequence)
                    plan.limits.append(limit)
            elif budget > 0:
                num_new = min(sequence.num_to_compute - 1, budget)  # the last token is a round's
                budget -= num_new
                start, stop = sequence.num_computed, sequence.num_computed + num_new
                if self._grow(sequence, stop, plan):
                    plan.sequences.append(sequence)
                    plan.rows.append(BatchRow(sequence.token_ids[start:stop], start, sequence.pages, 0))
        still = [(each, limit) for each, limit in zip(plan.decoding, plan.limits, strict=True) if each in self.running]
        plan.decoding, plan.limits = [each for each, _ in still], [limit for _, limit in still]
        return plan

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over: whole computed pages go to the prefix cache, everything else is free."""
        self._remove(sequence)
        self._release(sequence)
        if self._on_finish is not None:
            self._on_finish(sequence)

    def find(self, rid: str, attempt: int, choices: tuple[int, ...] | None) -> list[Sequence]:
        """Sequences of a request here, in any phase; `choices` None: all."""
        return [
            sequence
            for sequence in self
            if sequence.unit.rid == rid
            and sequence.unit.attempt <= attempt
            and (choices is None or sequence.unit.choice in choices)
        ]

    def __iter__(self) -> Iterator[Sequence]:
        yield from list(self.reserved.values())
        yield from list(self.running)
        yield from list(self.preempted)

    # --- pages ---

    def _with_two_rounds(self, num_tokens: int) -> int:
        """Slots of a sequence and its next two rounds: the second begins where a fully accepted first one ends. Not
        beyond the context, which drafts may leave empty-handed."""
        return decode_len(num_tokens, 1 + self.shape.num_steps + self.shape.num_slots, self.context_len)

    @property
    def _is_under_way(self) -> bool:
        return any(sequence.num_coming for sequence in self.running)

    def _ends(self, sequence: Sequence) -> bool:
        """The round under way brings its last token, or takes it to the end of the context."""
        if not sequence.num_coming:
            return False
        return sequence.num_generated + 1 >= sequence.request.params.max_tokens or self._room(sequence) < 0

    def _room(self, sequence: Sequence) -> int:
        """Tokens that still fit into the context."""
        return self.context_len - len(sequence.token_ids) - sequence.num_coming

    def _round_shape(self, chosen: DraftShape | None) -> DraftShape:
        """How much to draft now: not more than the one that can use most."""
        if chosen is None and self._rests is not None and self._rests():
            return NO_DRAFTS
        decoding = [each for each in self.running if each.num_to_compute == 1 and not self._ends(each)]
        usable = [self._usable(sequence) for sequence in decoding]
        if not any(usable):
            return NO_DRAFTS
        shape = chosen
        if shape is None:
            shape = self.shape if self._choose is None else self._choose(decoding, usable)
        return shape.with_steps(min(shape.num_steps, max(usable))) if shape.is_chain else shape

    def _usable(self, sequence: Sequence) -> int:
        """Drafts that it could accept: within its context, its own wish, and what it still has to generate."""
        params = sequence.request.params
        wish = self.shape.num_steps if params.draft_steps is None else params.draft_steps
        left = params.max_tokens - sequence.num_generated - 1 - bool(sequence.num_coming)
        return 0 if sequence.is_left_behind else max(0, min(self.shape.num_steps, wish, self._room(sequence), left))

    def _draft_limit(self, sequence: Sequence, shape: DraftShape) -> int:
        """Drafts that it may accept in a round of `shape`, with pages for their slots. Nobody is preempted for them."""
        limit = min(shape.num_steps, self._usable(sequence)) if shape.num_steps else 0
        if limit == 0:
            return 0
        num_slots = 1 + limit if shape.is_chain else shape.num_slots
        num_tokens = sequence.num_computed + sequence.num_coming + num_slots
        missing = -(-num_tokens // self.page_size) - len(sequence.pages)
        if missing > self.cache.available:
            return 0
        if missing > 0:
            sequence.pages += self.cache.allocate(missing, Owner.REQUEST)
        return limit

    def _grow(self, sequence: Sequence, num_tokens: int, plan: Plan) -> bool:
        """Pages for `num_tokens` of `sequence`, preempting younger ones. False: it was itself preempted, or failed, or
        nobody may be preempted now."""
        missing = -(-num_tokens // self.page_size) - len(sequence.pages)
        while missing > 0:
            try:
                sequence.pages += self.cache.allocate(missing, Owner.REQUEST)
                break
            except OutOfPages:
                if self._is_under_way:
                    plan.is_premature = True
                    return False
                youngest = self.running[-1]
                if youngest is sequence and len(self.running) == 1 and not self.reserved:
                    self.finish(sequence)
                    plan.failed.append(sequence)
                    return False
                self._preempt(youngest)
                if youngest is sequence:
                    return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.clock.preempted(sequence.num_generated)
        self.num_preemptions += 1
        bisect.insort(self.preempted, sequence, key=_order)

    def _resume(self) -> None:
        """Oldest first, when its pages, two rounds and a page of headroom for every running sequence are there."""
        while self.preempted and len(self.running) + len(self.reserved) < self.max_running:
            sequence = self.preempted[0]
            num_tokens = len(sequence.token_ids)
            headroom = len(self.running) * self.page_size
            if not self._take_pages(
                sequence, self._with_two_rounds(num_tokens), (num_tokens - 1) // self.page_size, headroom
            ):
                return
            self.preempted.pop(0)
            assert sequence.lease is not None
            sequence.num_computed = len(sequence.lease.pages) * self.page_size
            sequence.clock.resumed()
            bisect.insort(self.running, sequence, key=_order)

    def _take_pages(self, sequence: Sequence, num_tokens: int, limit_pages: int, headroom: int = 0) -> bool:
        lease = self.cache.acquire(sequence.token_ids, sequence.request.cache_salt, limit_pages)
        num_pages = -(-num_tokens // self.page_size) - len(lease.pages)
        try:
            if num_pages + -(-headroom // self.page_size) > self.cache.available:
                raise OutOfPages("no headroom")
            own = self.cache.allocate(num_pages, Owner.REQUEST)
        except OutOfPages:
            self.cache.release(lease)
            return False
        sequence.lease, sequence.pages = lease, lease.pages + own
        return True

    def _cache_pages(self, sequence: Sequence) -> None:
        """Hand whole computed pages to the prefix cache; the sequence goes on reading its own block table."""
        assert sequence.lease is not None, sequence.unit
        known = sequence.token_ids[: max(0, sequence.num_computed - sequence.num_missed)]  # no holes in draft KV
        pages = sequence.pages[: len(known) // self.page_size]
        self.cache.insert(known, pages, sequence.request.cache_salt, sequence.lease)

    def _release(self, sequence: Sequence) -> None:
        if sequence.lease is None:  # preempted: it holds nothing
            return
        self._cache_pages(sequence)
        self.num_releases += 1
        self.cache.release(sequence.lease, sequence.pages)
        sequence.lease, sequence.pages = None, []

    def _remove(self, sequence: Sequence) -> None:
        if self.reserved.pop(sequence.unit, None) is None:
            (self.running if sequence in self.running else self.preempted).remove(sequence)


def _order(sequence: Sequence) -> int:
    return sequence.order
