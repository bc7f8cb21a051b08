"""Rounds of a node's running sequences: makes the work of an executor from sequences, and gives them its results.

A round is submitted and collected. If the executor runs ahead, the node submits a round while the one before runs. It
then knows of every sequence only the most that the round before may bring: what a round must know exactly lies in the
slots on the device, and all work on slots and pages is done in the order of submission.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ...metadata.errors import ChunkOutOfMemory, OutOfMemory, RoundOutOfMemory
from ..pace.draft_length import DraftShape
from ..sampling.state import Needs, SamplingState, covering
from ..state.tail_pages import TailPages
from ..work import (
    MAX_MISSED,
    Accepted,
    BatchRow,
    CatchUp,
    LoadSlot,
    LocalRow,
    Masking,
    Recompute,
    Round,
    RoundTokens,
    Scores,
    TableChange,
    catch_up_sizes,
)
from .executor import Executor


class Running(Protocol):
    """The part of a sequence that rounds use. `Rounds` writes `slot` and `num_missed`, and clears `lacks_draft`."""

    slot: int | None
    token_ids: list[int]  # the last one is the bonus token
    pages: list[int]  # the block table; it grows in place, and any other change makes a new list
    tail: TailPages | None  # the table of tail pages, which is as long; None: the model has none
    sampling: SamplingState
    num_missed: int  # rows since the drafter last saw one; beyond MAX_MISSED, after a `reload`, it never will again
    lacks_draft: bool  # the drafter has no state of its local prompt yet

    @property
    def salt(self) -> str:
        """Requests of one salt may learn from each other."""
        ...


class LocalChunk(NamedTuple):
    """Tokens of sequences that have lost their KV or never had it: `rows[i]` are of `sequences[i]`."""

    sequences: Sequence[Running]
    rows: Sequence[BatchRow]


class Submitted(NamedTuple):
    """A round that the executor does or has done."""

    sequences: list[Running]
    slots: list[int]
    shape: DraftShape
    limits: list[int]
    num_caught_up: int  # rows that the drafter had not seen before
    kind: Needs  # of sampling; rounds of a kind take the same time
    is_delayed: bool = False  # a chunk of another rank of the group shared its forward


class _SentTable(NamedTuple):
    """The part of a block table that the executor knows."""

    pages: list[int]  # the sequence's own list
    num_pages: int


@dataclass(slots=True)
class RoundStats:
    """Counts since the start: how many drafts were made and accepted, and what grammars cost."""

    accepted_at: list[int]  # by draft position: how often that draft was accepted
    num_verified: int = 0  # sequences whose drafts were verified, once per round
    num_drafted: int = 0
    num_accepted: int = 0
    masked_rounds: int = 0  # with grammars
    late_masks: int = 0  # of these, the rounds in which the device waited for the masks
    mask_s: float = 0.0  # that the host took to fill masks

    def count_masks(self, masking: Masking | None) -> None:
        """Count what the grammars of a round cost, if it had some."""
        if masking is not None:
            self.masked_rounds += 1
            self.late_masks += masking.is_late
            self.mask_s += masking.fill_s

    def count(self, accepted: Accepted) -> None:
        """Count a round of one sequence, if the sequence could accept a draft."""
        if not accepted.num_drafted:
            return
        self.num_verified += 1
        self.num_drafted += accepted.num_drafted
        self.num_accepted += accepted.num_accepted
        for at in range(accepted.num_accepted):
            self.accepted_at[at] += 1


class Rounds:
    """Owns the numbers of the slots, and knows what the executor knows of each. One thread."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.shape = executor.shape
        self.stats = RoundStats([0] * self.shape.num_steps)
        self._free = list(range(executor.num_slots - 1, -1, -1))
        self._sent: dict[int, _SentTable] = {}  # by slot

    def admit(self, sequence: Running, row: bytes | None) -> None:
        """Give a sequence a slot. All its tokens but the last will have KV when its first round begins. `row`: the
        metadata row that brought its prompt, if it has one. Raises OutOfMemory; then the sequence has no slot."""
        assert self._free, "more sequences run than there are slots"
        slot = self._free[-1]
        self.executor.submit(LoadSlot(slot, sequence.token_ids, sequence.sampling, row))
        sequence.slot = self._free.pop()

    def reload(self, sequence: Running) -> None:
        """Load a sequence into its slot again, from its tokens, after a round had no memory. The KV of these tokens is
        still there. The drafter's state is not, so the sequence never drafts again. Raises OutOfMemory; then the
        sequence must be finished."""
        if self.shape.num_steps:
            sequence.num_missed = max(sequence.num_missed, MAX_MISSED + 1)
        self.executor.submit(LoadSlot(_slot(sequence), sequence.token_ids, sequence.sampling))

    def release(self, sequence: Running) -> None:
        """Take the slot of a sequence that is over. A sequence that never ran has none."""
        if sequence.slot is None:
            return
        if self.executor.proposer is not None:
            self.executor.proposer.forget(sequence.slot, sequence.token_ids, sequence.salt)
        assert sequence.slot not in self._free, sequence.slot
        self._free.append(sequence.slot)
        self._sent.pop(sequence.slot, None)
        sequence.slot = None

    def run(self, sequences: Sequence[Running], shape: DraftShape, limits: Sequence[int]) -> RoundTokens:
        """Submit a round and collect it. Without sequences nothing runs."""
        return self.collect(self.submit(sequences, shape, limits)) if sequences else RoundTokens([])

    def submit(
        self,
        sequences: Sequence[Running],
        shape: DraftShape,
        limits: Sequence[int],
        beside: LocalChunk | None = None,
    ) -> Submitted:
        """Begin a round: drafts of `shape` for all, of which the i-th sequence takes at most limits[i] (`Round` says
        which pages they must have). The round before may be under way, unless `reads_tokens`. The chunk `beside` it is
        of other sequences, and is computed as by `recompute`.

        Raises OutOfMemory if the device has no memory for it. Collect the round before; then finish or `reload` each
        of `sequences`. The chunk is computed only if the error is RoundOutOfMemory. Raises ChunkOutOfMemory if the
        device has no memory for the chunk; then neither has changed anything."""
        num_caught_up, steps, is_after_chunk = 0, self.executor.group_steps, False
        if steps is not None:
            if beside is not None and not steps.joins_chunks:
                self._compute_apart(beside)
                beside, is_after_chunk = None, True
            may_draft = all(len(sequence.token_ids) > 1 for sequence in sequences)
            rows = () if beside is None else beside.rows
            shape = steps.agree_round(len(sequences), shape, rows, may_draft=may_draft)
            limits = [min(limit, shape.num_steps) for limit in limits]
        if shape.num_steps:
            limits = [
                0 if each.num_missed > MAX_MISSED else limit for each, limit in zip(sequences, limits, strict=True)
            ]
        late = sequences if shape.num_steps else [each for each in sequences if each.num_missed == MAX_MISSED]
        num_caught_up = self.num_missed(late)
        self.catch_up(late)
        work = self.make_round(sequences, shape, limits)
        if is_after_chunk:
            with _after_chunk():
                self.executor.submit(work)
        elif beside is None:
            self.executor.submit(work)
        else:
            self._submit_both(work, beside)
        if self.executor.keeps_missed_rows:
            for sequence in sequences:
                if shape.num_steps == 0 or sequence.num_missed > MAX_MISSED:  # nothing is accepted then
                    sequence.num_missed += 1
        is_delayed = steps is not None and steps.has_chunk_elsewhere
        kind = covering(work.needs)
        return Submitted(list(sequences), list(work.slots), shape, list(limits), num_caught_up, kind, is_delayed)

    def make_round(self, sequences: Sequence[Running], shape: DraftShape, limits: Sequence[int]) -> Round:
        """Return the work of a round. It must be submitted, since it has the changes of block tables."""
        proposer = self.executor.proposer
        proposed: list[list[int]] = []
        if proposer is not None and shape.num_steps:
            proposed = [proposer.lookup(_slot(each), each.token_ids, each.salt, shape.num_steps) for each in sequences]
        return Round(
            slots=[_slot(sequence) for sequence in sequences],
            num_pages=[len(sequence.pages) for sequence in sequences],
            changes=self._changes(sequences),
            limits=limits,
            num_missed=[sequence.num_missed for sequence in sequences],
            shape=shape,
            needs=_needs(sequences),
            num_logprobs=[sequence.sampling.params.num_logprobs for sequence in sequences],
            proposed=proposed,
        )

    def collect(self, submitted: Submitted) -> RoundTokens:
        """Wait for a round. Rounds are collected in the order in which they were submitted. The caller appends the
        tokens, of which the last has no KV yet. A sequence that was released meanwhile has None."""
        report = self.executor.collect()
        live = [
            accepted if sequence.slot is not None else None
            for sequence, accepted in zip(submitted.sequences, report.rows, strict=True)
        ]
        self.stats.count_masks(report.masking)
        for accepted in live:
            if accepted is not None:
                self.stats.count(accepted)
        return RoundTokens(live)

    def catch_up(self, sequences: Sequence[Running]) -> None:
        """Let the drafter see the rows that rounds without drafts left out, oldest first, as many at a time as a round
        brings. Rounds do so before they draft, and before the device would lose a row."""
        late = [sequence for sequence in sequences if 0 < sequence.num_missed <= MAX_MISSED]
        if not late:
            return
        needs = _needs(sequences)._replace(num_logprobs=None)
        one, most = catch_up_sizes(self.shape)
        done = 0
        while late:
            num_rows = most if any(sequence.num_missed > done + 1 for sequence in late) else one
            self.executor.submit(
                CatchUp(
                    slots=[_slot(sequence) for sequence in late],
                    num_pages=[len(sequence.pages) for sequence in late],
                    changes=self._changes(late),
                    firsts=[done] * len(late),
                    num_missed=[sequence.num_missed - done for sequence in late],
                    num_rows=num_rows,
                    needs=needs,
                )
            )
            done += num_rows
            for sequence in late:
                if sequence.num_missed <= done:
                    sequence.num_missed = 0
            late = [sequence for sequence in late if sequence.num_missed]

    def recompute(self, sequences: Sequence[Running], rows: Sequence[BatchRow]) -> None:
        """Compute tokens of sequences that have lost their KV or never had it.

        If a sequence lost its KV, only KV is made: the slot has kept the state, which is of the same tokens, and draft
        KV that depends on tokens not known yet is stored anew by the next round. If the row ends a local prompt, the
        drafter's state is made, too. If rows have scored tokens, collect the scores before the next call. Raises
        OutOfMemory; then the tokens are not computed, and nothing else has changed."""
        work = self._recompute_of(sequences, rows)
        self.executor.submit(work)
        _note_drafts(work, sequences)

    def collect_scores(self) -> Scores:
        """Wait for the last `recompute`, whose rows had scored tokens, and return the report."""
        return self.executor.collect_scores()

    def reads_tokens(self, shape: DraftShape) -> bool:
        """Whether a round needs to know on the host what the round before brought."""
        return shape.num_steps > 0 and self.executor.proposer is not None

    def num_missed(self, sequences: Sequence[Running]) -> int:
        """Return how many rows the drafter must catch up on before it drafts for these sequences."""
        return sum(each.num_missed for each in sequences if each.num_missed <= MAX_MISSED)

    def kind(self, sequences: Sequence[Running]) -> Needs:
        """Return the kind of sampling of a round of these sequences."""
        return covering(_needs(sequences))

    def replay(self, sequence: Running, num_tries: int) -> tuple[int, int]:
        """Compare what the host's proposer would have proposed with the tokens that came. Return the number of right
        drafts and of tries. (0, 0): drafts are not proposed on the host."""
        proposer = self.executor.proposer
        if proposer is None:
            return 0, 0
        return proposer.replay(_slot(sequence), sequence.token_ids, sequence.salt, self.shape.num_steps, num_tries)

    def _compute_apart(self, beside: LocalChunk) -> None:
        """Submit a chunk before the round beside it."""
        try:
            self.recompute(beside.sequences, beside.rows)
        except OutOfMemory as error:
            raise ChunkOutOfMemory(str(error)) from None

    def _submit_both(self, work: Round, beside: LocalChunk) -> None:
        chunk = self._recompute_of(*beside)
        try:
            self.executor.submit(replace(work, beside=chunk))
        except ChunkOutOfMemory:
            raise
        except OutOfMemory as error:
            _note_drafts(chunk, beside.sequences)
            raise RoundOutOfMemory(str(error)) from None
        _note_drafts(chunk, beside.sequences)

    def _recompute_of(self, sequences: Sequence[Running], rows: Sequence[BatchRow]) -> Recompute:
        local: list[LocalRow] = []
        for index, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
            if sequence.lacks_draft and self.executor.num_prompt_states:
                is_last = row.position + len(row.input_ids) == len(sequence.token_ids) - 1
                local.append(LocalRow(index, _slot(sequence), sequence.sampling if is_last else None))
        num_logprobs: list[int] = []
        if any(row.num_scored for row in rows):
            num_logprobs = [sequence.sampling.params.num_logprobs or 0 for sequence in sequences]
        return Recompute(rows, [sequence.token_ids for sequence in sequences], local, num_logprobs)

    def _changes(self, sequences: Sequence[Running]) -> list[TableChange]:
        """Return the columns of block tables that the executor does not know yet."""
        changes: list[TableChange] = []
        for sequence in sequences:
            slot, pages, first = _slot(sequence), sequence.pages, 0
            num_pages, sent = len(pages), self._sent.get(slot)
            if sent is not None and sent.pages is pages:
                if sent.num_pages == num_pages:
                    continue
                first = sent.num_pages
            assert first <= num_pages, (first, num_pages)
            tail = None if sequence.tail is None else sequence.tail.pages[first:num_pages]
            changes.append(TableChange(slot, first, pages[first:], tail))
            self._sent[slot] = _SentTable(pages, num_pages)
        return changes


@contextmanager
def _after_chunk() -> Iterator[None]:
    """Submit a round whose chunk is computed. Raises RoundOutOfMemory in place of OutOfMemory."""
    try:
        yield
    except OutOfMemory as error:
        raise RoundOutOfMemory(str(error)) from None


def _note_drafts(done: Recompute, sequences: Sequence[Running]) -> None:
    """Note which of the chunk's sequences have the drafter's state now."""
    for each in done.local:
        if each.sampling is not None:
            sequences[each.row].lacks_draft = False


def _needs(sequences: Sequence[Running]) -> Needs:
    return Needs.any_of(sequence.sampling.needs for sequence in sequences)


def _slot(sequence: Running) -> int:
    assert sequence.slot is not None, "the sequence was not admitted"
    return sequence.slot
