"""The decode scheduler: decides which sequences a step runs. sequence_pages.py gets their pages and frees them.

    reserve --> reserved --start_pulled, start_local--> running --finish--> (pages to the prefix cache)
                                                        |     ^
                                                     preempt  resume (recompute in chunks)
                                                        v     |
                                                       preempted

A reserved sequence holds all pages of its prompt and of two rounds, so it can run as soon as its prompt arrives. Pages
for drafts are taken only if they are free; a sequence without them takes part in a round and accepts no draft. If no
page is free for the next token itself, the youngest running sequence is preempted. Older ones always advance, so
everything finishes. While a sequence is preempted, no new reservation is granted.

A round may be planned while the one before is under way. The host then knows each sequence only up to the `num_coming`
tokens that this round may bring. The plan has pages for all of them, and leaves out a sequence that certainly ends. If
the round under way ends another sequence, that sequence is still in the plan, without effect. The scheduler preempts no
sequence in this state. It sets the plan's `is_premature`: the node settles the round under way and plans again.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..engine.pace.draft_length import NO_DRAFTS, DraftShape
from ..engine.pace.mixed_sizes import NO_SIZE, MixedSizes
from ..engine.state.prefix_cache import PrefixCache
from ..engine.state.tail_pages import Windows
from ..engine.work import MAX_MISSED, BatchRow
from ..metadata.errors import OutOfPages
from ..metadata.wire.request import Unit
from .chunk_length import ChunkRoom, PromptTokens, Queue
from .sequence import Sequence
from .sequence_pages import SequencePages

Choose = Callable[[list[Sequence], list[int]], DraftShape]
Budget = Callable[[int, int, Queue], ChunkRoom]


@dataclass(slots=True)
class StepPlan:
    """One step: a round of the sequences that decode, and chunks of those whose tokens are computed here."""

    decoding: list[Sequence] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)  # drafts that each of `decoding` may accept
    shape: DraftShape = NO_DRAFTS
    sequences: list[Sequence] = field(default_factory=list)  # one for each of `rows`
    rows: list[BatchRow] = field(default_factory=list)
    chunk: PromptTokens | None = None  # the tokens of `rows` that take the device's time; None: there are no rows
    failed: list[Sequence] = field(default_factory=list)  # they can never go on: the pool is too small for them
    is_premature: bool = False  # settle the round under way first, then plan again
    is_overlapping: bool = False  # a round is under way, so the plan preempts no sequence

    @property
    def is_scored(self) -> bool:
        """Whether tokens of the chunks are scored."""
        return any(row.num_scored for row in self.rows)


class Streams(NamedTuple):
    """Sequences for which a chunk of prompts must not take long."""

    num_decoding: int = 0
    is_awaited: bool = False  # one decodes as soon as its pages have arrived

    def with_others(self, others: Streams) -> Streams:
        """Return these sequences and others."""
        return Streams(self.num_decoding + others.num_decoding, self.is_awaited or others.is_awaited)

    @property
    def has_any(self) -> bool:
        return bool(self.num_decoding) or self.is_awaited


class DecodeScheduler:
    """Owns the reserved, running and preempted sequences."""

    def __init__(
        self,
        cache: PrefixCache,
        max_running: int,
        chunk_tokens: int,
        *,
        shape: DraftShape = NO_DRAFTS,
        context_len: int = 1 << 30,
        num_prompt_states: int = 0,
        choose: Choose | None = None,
        rests: Callable[[], bool] | None = None,
        budget: Budget | None = None,
        mixed: MixedSizes = NO_SIZE,
        windows: Windows = Windows(),  # noqa: B008 - immutable
        on_finish: Callable[[Sequence], None] | None = None,
        streams_elsewhere: Callable[[], Streams] = Streams,
    ) -> None:
        """Make a scheduler without sequences.

        `shape`: the largest draft of a round.
        `num_prompt_states`: how many of the last positions of a local prompt are computed even if their pages are
        cached, because the drafter needs their hidden states.
        `choose` gets the sequences of the next round and the number of drafts that each could use, and returns the
        shape to draft; None: always `shape`. `rests` is called once per round, and returns whether the round drafts
        nothing for any sequence.
        `budget` gets the number of sequences that decode, the draft steps of their round, and the tokens that need KV.
        It returns how much of these the step computes. None, or nothing decodes and no pages are on the way:
        `chunk_tokens`.
        `mixed`: the rounds and chunks that share a forward. A sequence whose last chunk is in such a forward takes part
        in the round, too.
        `windows`: positions that the layers read back; pages before those that any layer sees are given back.
        `on_finish` is called for every finished sequence. `streams_elsewhere` returns the sequences of other ranks
        that a chunk delays, too."""
        self.cache = cache
        self.shape = shape
        self.context_len = context_len
        self._choose, self._rests, self._budget = choose, rests, budget
        self.mixed = mixed
        self._on_finish = on_finish
        self._streams_elsewhere = streams_elsewhere
        self.page_size = cache.pool.page_size
        first_rounds_len = 1 + shape.num_steps + shape.num_slots  # the second begins where a fully accepted one ends
        self.pages = SequencePages(cache, first_rounds_len, context_len, num_prompt_states, windows, chunk_tokens)
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.reserved: dict[Unit, Sequence] = {}
        self.running: list[Sequence] = []  # oldest first
        self.preempted: list[Sequence] = []  # oldest first
        self._by_rid: dict[str, list[Sequence]] = {}  # in any phase
        self._left: set[Sequence] = set()  # sequences that were preempted or failed since the plan was begun
        self.num_preemptions = 0

    # --- reservation and start ---

    def reserve(self, sequence: Sequence) -> bool:
        """Take all pages of the prompt (except cached ones) and of two rounds, or nothing (False)."""
        if self.preempted or len(self.running) + len(self.reserved) >= self.max_running:
            return False
        if not self.pages.take(sequence, is_pulled=not sequence.is_local):
            return False
        if sequence.is_local:
            self.pages.fetch(sequence)
        self.reserved[sequence.unit] = sequence
        self._by_rid.setdefault(sequence.unit.rid, []).append(sequence)
        return True

    def start_pulled(self, unit: Unit) -> Sequence:
        """Run a reserved sequence whose pages have all arrived. `share_computed` then shares them."""
        sequence = self.reserved.pop(unit)
        sequence.start_pulled()
        bisect.insort(self.running, sequence, key=_order)
        return sequence

    def start_local(self, unit: Unit) -> Sequence:
        """Run a reserved sequence whose prompt is computed here, in chunks. No pages will arrive for it."""
        sequence = self.reserved.pop(unit)
        sequence.start_local(self.page_size)
        bisect.insort(self.running, sequence, key=_order)
        return sequence

    def share_computed(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """Give the full computed pages of a running sequence to the prefix cache, so that other sequences find them.
        `num_tokens`: only pages of the first so many tokens; None: of all tokens whose KV target and drafter have."""
        self.pages.share(sequence, num_tokens=num_tokens)
        is_prompt = sequence.is_local and sequence.num_generated == 0
        if is_prompt and len(self._by_rid[sequence.unit.rid]) > 1 and self._has_shared_prompt(sequence):
            self.pages.share_tails(sequence)  # the other choices continue behind them

    @property
    def is_open(self) -> bool:
        """Whether a reservation may be granted: no preempted sequence comes first."""
        return not self.preempted

    @property
    def streams(self) -> Streams:
        """The sequences that a chunk beside the next round would delay."""
        return Streams(self.num_streams, any(not sequence.is_local for sequence in self.reserved.values()))

    @property
    def num_streams(self) -> int:
        """Running sequences that decode, and wait for nothing but rounds."""
        return sum(sequence.num_to_compute == 1 for sequence in self.running)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of local prompts and of resumed sequences that are still to compute."""
        num_tokens = sum(max(0, sequence.num_to_compute - 1) for sequence in (*self.running, *self.preempted))
        reserved = [sequence for sequence in self.reserved.values() if sequence.is_local]  # they start in this step
        return num_tokens + sum(self.pages.num_uncached(sequence) - 1 for sequence in reserved)

    # --- one step ---

    def plan(self, shape: DraftShape | None = None) -> StepPlan:
        """Choose the sequences, pages and prompt tokens of the next step, and return them as a plan.

        First the scheduler resumes preempted sequences that fit. Then every running sequence gets the pages that it
        needs. If pages are short, the scheduler preempts the youngest sequence.

        `shape`: the draft shape that an earlier plan chose for this round; None: choose it now."""
        is_under_way = any(sequence.num_coming for sequence in self.running)
        if not is_under_way:
            self._resume()
        plan = StepPlan(is_premature=bool(self.preempted) and is_under_way, is_overlapping=is_under_way)
        running, left = list(self.running), self._left
        left.clear()
        plan.shape, usable = self._choose_shape(running, shape)
        decoding, limits, num_steps = plan.decoding, plan.limits, plan.shape.num_steps
        room = self._chunk_room(running, plan.shape)
        budget = room.num_tokens
        for sequence, num_usable in zip(running, usable, strict=True):
            if left and sequence in left:  # it was preempted for an older one
                continue
            if sequence.num_computed + sequence.num_coming <= sequence.routine_until:
                decoding.append(sequence)
                limits.append(num_steps if num_steps < num_usable else num_usable)
                continue
            num_to_compute = len(sequence.token_ids) - sequence.num_computed
            if num_to_compute > 1 and sequence.is_local:
                if self._waits_for_choice(sequence) or self.pages.awaits_files(sequence):
                    continue
                num_to_compute -= self.pages.exchange(sequence)
            if num_to_compute == 1:
                self._plan_round(sequence, num_usable, plan)
            elif budget > 0:
                is_over = len(plan.rows) == room.num_prompts or (room.is_mixed and _is_scored(sequence))
                budget = 0 if is_over else budget - self._plan_chunk(sequence, budget, plan)
        if left:
            still = [(each, limit) for each, limit in zip(plan.decoding, plan.limits, strict=True) if each not in left]
            plan.decoding, plan.limits = [each for each, _ in still], [limit for _, limit in still]
        if plan.rows:
            plan.chunk = PromptTokens.of(plan.rows)
            self._join_computed(plan)
        return plan

    def usable_drafts(self) -> list[int] | None:
        """Return how many drafts each running sequence can accept in the next round: limited by its context, max_tokens
        and draft_steps. A sequence that takes no part in the round can accept none.

        None: the round must draft nothing, since before a token that has KV a drafter has no position to draft from."""
        most, context_len, usable = self.shape.num_steps, self.context_len, list[int]()
        for sequence in self.running:
            if sequence.num_computed + sequence.num_coming <= sequence.routine_until:
                usable.append(0 if sequence.num_missed > MAX_MISSED else most)
                continue
            num_tokens, num_coming, params = len(sequence.token_ids), sequence.num_coming, sequence.request.params
            if num_tokens == 1 and not num_coming:
                return None
            if num_tokens - sequence.num_computed != 1 or sequence.num_missed > MAX_MISSED:
                usable.append(0)
                continue
            num_left = params.max_tokens - num_tokens + sequence.prompt_len - 1 - (num_coming > 0)
            num_left = min(num_left, context_len - num_tokens - num_coming, most)
            if params.draft_steps is not None:
                num_left = min(num_left, params.draft_steps)
            usable.append(max(0, num_left))
        return usable

    def drafting(self, usable: list[int]) -> tuple[list[Sequence], list[int]]:
        """Return the sequences of the next round, and of `usable`, which has a number for each running sequence, the
        numbers of these."""
        decoding = [
            (sequence, num)
            for sequence, num in zip(self.running, usable, strict=True)
            if sequence.num_to_compute == 1 and not (sequence.num_coming and self._ends(sequence))
        ]
        return [sequence for sequence, _ in decoding], [num for _, num in decoding]

    def preempt(self, sequence: Sequence) -> None:
        """Take all pages from a running sequence. It is resumed later, before any reservation is granted."""
        _remove(self.running, sequence)
        self._left.add(sequence)
        self.pages.release(sequence)
        sequence.preempt()
        self.num_preemptions += 1
        bisect.insort(self.preempted, sequence, key=_order)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any phase. The prefix cache gets its full computed pages; all others become free."""
        if self.reserved.pop(sequence.unit, None) is None:
            is_held = _remove(self.running, sequence) or _remove(self.preempted, sequence)
            assert is_held, sequence.unit
        self._left.add(sequence)
        of_rid = self._by_rid[sequence.unit.rid]
        of_rid.remove(sequence)
        if not of_rid:
            del self._by_rid[sequence.unit.rid]
        self.pages.release(sequence)
        if self._on_finish is not None:
            self._on_finish(sequence)

    def find(self, rid: str, attempt: int, choices: tuple[int, ...] | None) -> list[Sequence]:
        """Return the sequences of this rid and of this or an earlier attempt, in any phase. `choices` None: all."""
        return [
            sequence
            for sequence in self._by_rid.get(rid, ())
            if sequence.unit.attempt <= attempt and (choices is None or sequence.unit.choice in choices)
        ]

    def get(self, unit: Unit) -> Sequence | None:
        """Return the sequence of this unit, in any phase; None: no such sequence is held."""
        return next((sequence for sequence in self._by_rid.get(unit.rid, ()) if sequence.unit == unit), None)

    def __len__(self) -> int:
        return len(self.reserved) + len(self.running) + len(self.preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from list(self.reserved.values())
        yield from list(self.running)
        yield from list(self.preempted)

    def _plan_round(self, sequence: Sequence, num_usable: int, plan: StepPlan) -> None:
        num_coming, shape = sequence.num_coming, plan.shape
        if num_coming and self._ends(sequence):
            return
        limit = min(shape.num_steps, num_usable)
        num_tokens = sequence.num_computed + num_coming + 1
        num_ahead = limit if shape.is_chain or limit == 0 else shape.num_slots - 1
        if num_tokens + num_ahead > len(sequence.pages) * self.page_size:  # rarely
            self.pages.give_back_unseen(sequence)
            limit = self._draft_limit(sequence, limit, num_tokens + num_ahead)
            if not self._grow(sequence, num_tokens, plan):
                return
        sequence.routine_until = self._routine_until(sequence)
        plan.decoding.append(sequence)
        plan.limits.append(limit)

    def _routine_until(self, sequence: Sequence) -> int:
        """Return up to how many tokens with KV, those of the round under way included, a round with all drafts needs no
        decision: the sequence has the pages, and neither max_tokens nor the context is near."""
        params, most = sequence.request.params, self.shape.num_steps
        if params.draft_steps is not None and params.draft_steps < most:
            return -1
        end = min(sequence.prompt_len + params.max_tokens - 1, self.context_len) - most - 1
        return min(end, len(sequence.pages) * self.page_size - self.shape.num_slots)

    def _chunk_room(self, running: list[Sequence], shape: DraftShape) -> ChunkRoom:
        """Return how much of the tokens without KV the step may compute."""
        first = next((each for each in running if len(each.token_ids) - each.num_computed > 1), None)
        if first is None or self._budget is None:
            return ChunkRoom(self.chunk_tokens)
        streams = self.streams.with_others(self._streams_elsewhere())
        if not streams.has_any:
            return ChunkRoom(self.chunk_tokens)
        num_done = max(0, first.num_computed - first.num_cached)
        queue = Queue(self.num_queued_tokens, first.num_computed, num_done, _is_scored(first))
        room = self._budget(streams.num_decoding, shape.num_steps, queue)
        return room._replace(num_tokens=min(self.chunk_tokens, room.num_tokens))

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Plan at most `budget` tokens that need KV, and return how many. The last token is left to a round."""
        num_new = min(sequence.num_to_compute - 1, budget)
        start, stop = sequence.num_computed, sequence.num_computed + num_new
        if self._grow(sequence, stop, plan):
            tail = None if sequence.tail is None else sequence.tail.pages
            plan.sequences.append(sequence)
            scores = sequence.prompt_scores
            num_scored = 0 if scores is None else scores.num_scored(start, num_new)
            plan.rows.append(BatchRow(sequence.token_ids[start:stop], start, sequence.pages, 0, num_scored, tail))
        return num_new

    def _join_computed(self, plan: StepPlan) -> None:
        """Let sequences that the planned chunk makes ready take part in the planned round, if both share a forward.
        They accept no draft there, since the drafter has no state of them before. A sequence that lost its KV waits,
        if the drafter has its state: its next round is one with the drafter."""
        ready = [
            sequence
            for sequence, row in zip(plan.sequences, plan.rows, strict=True)
            if row.position + len(row.input_ids) == len(sequence.token_ids) - 1
            and sequence.lacks_draft
            and sequence.num_missed == 0
            and len(sequence.token_ids) <= len(sequence.pages) * self.page_size
        ]
        num_seqs, num_tokens = len(plan.decoding) + len(ready), sum(len(row.input_ids) for row in plan.rows)
        if not ready or plan.is_scored or plan.is_premature:
            return
        if self.mixed.holds(num_seqs, plan.shape.num_steps, num_tokens, len(plan.rows)):
            plan.decoding += ready
            plan.limits += [0] * len(ready)

    def _waits_for_choice(self, sequence: Sequence) -> bool:
        """Whether an older choice of the same request computes pages of the same prompt now. They will be found in the
        prefix cache."""
        return any(
            other.order < sequence.order
            and other.unit.attempt == sequence.unit.attempt
            and other.lease is not None
            and not self._has_shared_prompt(other)
            for other in self._by_rid[sequence.unit.rid]
        )

    def _has_shared_prompt(self, sequence: Sequence) -> bool:
        """Whether a sequence has computed all pages that other choices of its request may find."""
        return sequence.num_computed >= self.pages.most_shared(sequence) * self.page_size

    # --- what a round may do ---

    def _ends(self, sequence: Sequence) -> bool:
        """Whether the round under way certainly ends the sequence, by max_tokens or by the context."""
        num_tokens = len(sequence.token_ids)
        num_generated = num_tokens - sequence.prompt_len
        return num_generated + 1 >= sequence.request.params.max_tokens or num_tokens + sequence.num_coming > (
            self.context_len
        )

    def _choose_shape(self, running: list[Sequence], chosen: DraftShape | None) -> tuple[DraftShape, list[int]]:
        """Return how much to draft now, no more than the sequence that can use most, and the number of drafts that each
        sequence can use. `chosen`: the shape that was chosen before for this round."""
        rests = chosen is None and self._rests is not None and self._rests()
        usable = None if rests or self.shape.num_steps == 0 else self.usable_drafts()
        if usable is None or not any(usable):
            return NO_DRAFTS, [0] * len(running)
        shape = chosen
        if shape is None:
            shape = self.shape if self._choose is None else self._choose(*self.drafting(usable))
        return narrowed(shape, usable), usable

    def _draft_limit(self, sequence: Sequence, limit: int, num_tokens: int) -> int:
        """Return `limit`, the drafts that the sequence may accept, and take the pages for `num_tokens`, those of its
        drafts included. Nobody is preempted for drafts: without free pages the limit is 0."""
        if limit == 0 or not self.pages.may_grow(sequence, num_tokens):
            return 0
        self.pages.grow(sequence, num_tokens)
        return limit

    # --- pages ---

    def _grow(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Get pages for `num_tokens` of `sequence`, and preempt younger ones if needed.

        False: the sequence was itself preempted, or failed, or nobody may be preempted now."""
        while True:
            try:
                self.pages.grow(sequence, num_tokens)
                return True
            except OutOfPages:
                if plan.is_overlapping:
                    plan.is_premature = True
                    return False
                youngest = self.running[-1]
                is_alone = youngest is sequence and len(self.running) == 1 and not self.reserved
                if is_alone and not self.pages.holds_copies(sequence):
                    self.finish(sequence)
                    plan.failed.append(sequence)
                    return False
                self.preempt(youngest)
                if youngest is sequence:
                    return False

    def _resume(self) -> None:
        """Resume preempted sequences, oldest first, while the pages for two rounds each are there and, as headroom, a
        page for every running sequence."""
        while self.preempted and len(self.running) + len(self.reserved) < self.max_running:
            sequence = self.preempted[0]
            if not self.pages.take(sequence, headroom=len(self.running)):
                return
            self.preempted.pop(0)
            sequence.resume(self.page_size)
            bisect.insort(self.running, sequence, key=_order)


def narrowed(shape: DraftShape, usable: Iterable[int]) -> DraftShape:
    """Return `shape` with no more steps than the sequence that can use most. A tree stays whole."""
    return shape.with_steps(min(shape.num_steps, max(usable))) if shape.is_chain else shape


def _is_scored(sequence: Sequence) -> bool:
    """Whether its next chunk scores tokens."""
    scores = sequence.prompt_scores
    return scores is not None and scores.num_scored(sequence.num_computed, 1) > 0


def _order(sequence: Sequence) -> int:
    return sequence.order


def _remove(by_age: list[Sequence], sequence: Sequence) -> bool:
    """Remove a sequence from a list in which the oldest is first. Return whether it was there."""
    index = bisect.bisect_left(by_age, sequence.order, key=_order)
    if index == len(by_age) or by_age[index] is not sequence:
        return False
    del by_age[index]
    return True
