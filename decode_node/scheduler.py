"""Which sequences run in a step, and whose the pages are.

    reserve --> reserved --admit--> running --finish--> (pages to the prefix cache)
                                    |     ^
                                 preempt  resume (recompute in chunks)
                                    v     |
                                   preempted

Reserved sequences hold all pages of their prompt and of two rounds, so an arrival never waits. When pages run out the
youngest running sequence is preempted; older ones always advance, so everything finishes. While one is preempted, no
new reservation is granted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..engine.batch import BatchRow
from ..engine.pages import Owner
from ..engine.prefix_cache import PrefixCache
from ..metadata.errors import OutOfPages
from ..metadata.request import Unit
from .sequence import Sequence


@dataclass(slots=True)
class Plan:
    """One step: the rows to compute with their sequences, the sequences that draft, and those that can never go on.

    Without speculation every running sequence has a row. With it, a sequence has one only while it is recomputed
    after a preemption; the others draft `num_steps` tokens each."""

    sequences: list[Sequence] = field(default_factory=list)  # of `rows`
    rows: list[BatchRow] = field(default_factory=list)
    drafting: list[Sequence] = field(default_factory=list)
    num_steps: int = 0
    failed: list[Sequence] = field(default_factory=list)


class DecodeScheduler:
    """Owns the reserved, running and preempted sequences and all pages they hold."""

    def __init__(
        self,
        cache: PrefixCache,
        max_running: int,
        chunk_tokens: int,
        *,
        num_steps: int | None = None,
        context_len: int = 1 << 30,
    ) -> None:
        """`num_steps`: tokens that a drafter proposes in a round, None without one."""
        self.cache = cache
        self.num_steps = num_steps
        self.context_len = context_len
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
        if not self._take_pages(sequence, num_tokens + 2 * self._round_tokens, (num_tokens - 1) // self.page_size):
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

    # --- one step ---

    def plan(self) -> Plan:
        """Resume what fits, find pages for everybody (preempting the youngest), and make the rows."""
        self._resume()
        plan = Plan(num_steps=self._round_steps())
        budget = self.chunk_tokens
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted for an older one
                continue
            if self.num_steps is not None and sequence.num_to_compute == 1:
                if self._grow(sequence, sequence.num_computed + 1 + plan.num_steps, plan.failed):
                    plan.drafting.append(sequence)
                continue
            num_left = sequence.num_to_compute - (self.num_steps is not None)  # a drafter's round takes the last token
            num_new = min(num_left, max(budget, 1))
            if sequence.num_to_compute > 1:
                budget -= num_new
                if budget < 0:
                    continue
            if not self._grow(sequence, sequence.num_computed + num_new, plan.failed):
                continue
            start, stop = sequence.num_computed, sequence.num_computed + num_new
            num_logits = 1 if stop == len(sequence.token_ids) else 0
            plan.sequences.append(sequence)
            plan.rows.append(BatchRow(sequence.token_ids[start:stop], start, sequence.pages, num_logits))
        return plan

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over: whole computed pages go to the prefix cache, everything else is free."""
        self._remove(sequence)
        self._release(sequence)

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

    @property
    def _round_tokens(self) -> int:
        """Tokens a round can add."""
        return 1 + (self.num_steps or 0)

    def _round_steps(self) -> int:
        """How many tokens to draft now: within every sequence's context, not beyond what the longest still wants."""
        drafting = [sequence for sequence in self.running if sequence.num_to_compute == 1]
        if not self.num_steps or not drafting:
            return 0
        room = min(self.context_len - len(sequence.token_ids) for sequence in drafting)
        wanted = max(sequence.request.params.max_tokens - sequence.num_generated for sequence in drafting)
        return max(0, min(self.num_steps, room, wanted - 1))

    def _grow(self, sequence: Sequence, num_tokens: int, failed: list[Sequence]) -> bool:
        """Pages for `num_tokens` of `sequence`, preempting younger ones. False: it was itself preempted, or failed."""
        missing = -(-num_tokens // self.page_size) - len(sequence.pages)
        while missing > 0:
            try:
                sequence.pages += self.cache.allocate(missing, Owner.REQUEST)
                break
            except OutOfPages:
                youngest = self.running[-1]
                if youngest is sequence and len(self.running) == 1 and not self.reserved:
                    self.finish(sequence)
                    failed.append(sequence)
                    return False
                self._preempt(youngest)
                if youngest is sequence:
                    return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        self.num_preemptions += 1
        bisect.insort(self.preempted, sequence, key=_order)

    def _resume(self) -> None:
        """Oldest first, when its pages, two rounds and a page of headroom for every running sequence are there."""
        while self.preempted and len(self.running) + len(self.reserved) < self.max_running:
            sequence = self.preempted[0]
            num_tokens = len(sequence.token_ids)
            headroom = len(self.running) * self.page_size
            if not self._take_pages(
                sequence, num_tokens + 2 * self._round_tokens, (num_tokens - 1) // self.page_size, headroom
            ):
                return
            self.preempted.pop(0)
            assert sequence.lease is not None
            sequence.num_computed = len(sequence.lease.pages) * self.page_size
            bisect.insort(self.running, sequence, key=_order)

    def _take_pages(self, sequence: Sequence, num_tokens: int, limit_pages: int, headroom: int = 0) -> bool:
        lease = self.cache.acquire(sequence.token_ids, sequence.request.salt, limit_pages)
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
        num_pages = sequence.num_computed // self.page_size
        self.cache.insert(
            sequence.token_ids[: sequence.num_computed],
            sequence.pages[:num_pages],
            sequence.request.salt,
            sequence.lease,
        )

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
