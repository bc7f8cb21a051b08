"""Rounds of an engine's running sequences: what the host does for run_round (round.py).

A round is submitted and collected. On a CUDA device the two are apart: the host can submit a round while the one before
runs, knowing of every sequence only the most that it may have brought, because what a round must know exactly lies in
the slots. Whatever is done to slots and pages between two rounds is ordered with them by the device's stream.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels import gpu
from ..metadata.request import SamplingParams, TokenLogprobs
from .batch import BatchRow
from .copies import recorded_event, to_device, to_host
from .drafters.base import Drafter, DraftState, PromptChunk, PromptTail
from .drafters.ngram import NgramDrafter
from .engine import Engine
from .graphs import GREEDY, SAMPLED, RoundGraphs
from .logprobs import Logprobs
from .progress import Progress
from .round import RoundResult, run_round
from .round_inputs import RoundInputs
from .sampling_state import Needs, SamplingState
from .slots import MAX_MISSED, Slots
from .trees import DraftShape

_MEASURED = SamplingParams(max_tokens=1, temperature=0.0)
_COUNTS = 2  # numbers of a row before its tokens
# Rows that a sequence lacks after a round that only measured, after a node's first rounds, and when drafts are tried
# again (adaptive.py); and the most of all sequences that are warmed up for.
_WARM_UP_MISSED, _MOST_WARM_UP_ROWS = (1, 4, 24), 1024


class Accepted(NamedTuple):
    """What a round brought one sequence."""

    token_ids: list[int]  # t_0 .. t_a, at least one; fewer where the target's logits are no numbers
    logprobs: list[TokenLogprobs | None]
    num_accepted: int  # a: drafts that equal the target's tokens
    num_drafted: int  # at most K: those that it would have taken


@dataclass(slots=True)
class RoundStats:
    """Counts since the start."""

    accepted_at: list[int]  # by draft position: how often that draft was accepted
    num_verified: int = 0  # sequences verified, once a round each
    num_drafted: int = 0
    num_accepted: int = 0

    def count(self, accepted: Accepted) -> None:
        """One sequence's round."""
        self.num_verified += 1
        self.num_drafted += accepted.num_drafted
        self.num_accepted += accepted.num_accepted
        for at in range(accepted.num_accepted):
            self.accepted_at[at] += 1


class Submitted(NamedTuple):
    """A round under way, or done."""

    sequences: list[Running]
    shape: DraftShape
    limits: list[int]
    numbers: Tensor  # of RoundResult, on the host once `event` has happened
    logprobs: Logprobs | None  # likewise
    event: torch.cuda.Event | None  # None where the device is the host
    num_caught_up: int  # rows that the drafter had not seen before


class Running(Protocol):
    """What rounds need of a sequence."""

    slot: int | None
    token_ids: list[int]  # the last one is the bonus token
    pages: list[int]
    sampling: SamplingState  # its history is the slot's
    num_missed: int  # rows since the drafter last saw one; beyond MAX_MISSED it never will again

    @property
    def salt(self) -> str:
        """Requests of one salt may learn from each other."""
        ...


@dataclass(slots=True)
class _Padding:
    """A `Running` that is nobody."""

    slot: int | None
    token_ids: list[int]
    pages: list[int]
    sampling: SamplingState
    num_missed: int = 0
    salt: str = ""


class Rounds:
    """Runs rounds of one engine, with its drafter where it has one. One thread."""

    def __init__(self, engine: Engine, num_slots: int, buckets: Sequence[int] = ()) -> None:
        """At most `num_slots` sequences run. `buckets`: batch sizes whose inputs are static."""
        self.engine = engine
        self.drafter = engine.drafter
        self.shape = DraftShape(0) if self.drafter is None else self.drafter.shape
        self.slots = Slots(num_slots, engine.model_config.vocab_size, self.drafter, engine.device)
        self.stats = RoundStats([0] * self.shape.num_steps)
        num_tokens = engine.context_len + 2 * self.shape.num_slots + engine.speculation.hidden.num_target_rows
        self._num_columns = -(-num_tokens // engine.pool.page_size) + 1
        # pages that a round may run past those of its sequences, into padding
        self._num_spare = -(-2 * self.shape.num_slots // engine.pool.page_size) + 1
        self._buckets = {size: deque(self._allocate_two(size)) for size in sorted(buckets)}
        self._graphs: RoundGraphs[RoundResult] | None = None

    def warm_up(self, progress: Progress | None = None) -> None:
        """Whatever is compiled or loaded when it is used first, so that no sequence waits for it. On CUDA: graphs of
        all buckets for requests without filters and penalties, which `progress` counts; others are captured when they
        come."""
        if gpu.compiled(self.engine.kv):
            inputs = [self._allocate(size, device=self.engine.device) for size in self._buckets]
            shapes = [self.shape.with_steps(steps) for steps in self.shape.choices]
            with torch.inference_mode():
                self._graphs = RoundGraphs(self._run_captured, inputs, self.slots.padding)
                self._graphs.capture(shapes, (GREEDY, SAMPLED), progress)
            self.measure(1, 0)  # compiles what surrounds a graph
        if self.drafter is None or not self.drafter.has_kv:
            return
        with torch.inference_mode():
            for size, num_missed in itertools.product(self._buckets or [1], _WARM_UP_MISSED):
                if size * num_missed <= _MOST_WARM_UP_ROWS:
                    self._catch_up([self._nobody(num_missed) for _ in range(size)], [0] * size)

    def admit(self, sequence: Running, length: int, draft: DraftState | None) -> None:
        """Give a sequence a slot: `length` tokens have KV, one more is known."""
        sequence.slot = self.slots.take()
        with torch.inference_mode():  # as rounds, which may have allocated columns
            self.slots.load(sequence.slot, length, sequence.token_ids[-1], sequence.sampling, draft)
        sequence.sampling.forget_history()

    def release(self, sequence: Running) -> None:
        """The sequence is over, if it ever ran."""
        if sequence.slot is not None:
            if isinstance(self.drafter, NgramDrafter):
                self.drafter.forget(sequence.slot, sequence.token_ids, sequence.salt)
            self.slots.give_back(sequence.slot)
            sequence.slot = None

    def run(self, sequences: Sequence[Running], shape: DraftShape, limits: Sequence[int]) -> list[Accepted]:
        """`submit` and `collect` in one. No sequences: nothing runs."""
        results = self.collect(self.submit(sequences, shape, limits)) if sequences else []
        return [accepted for accepted in results if accepted is not None]

    def submit(self, sequences: Sequence[Running], shape: DraftShape, limits: Sequence[int]) -> Submitted:
        """Begin a round: drafts of `shape` for all, of which the i-th sequence takes at most limits[i]. Pages must
        cover its tokens, and `shape.num_slots` more where its limit is not 0 (in a chain: limit + 1 more), counted from
        the most that the round before may have brought.

        The round before may be under way, unless `reads_tokens`. At most two are under way."""
        num_caught_up = self.num_missed(sequences) if shape.num_steps else 0
        with torch.inference_mode():
            if shape.num_steps:
                limits = self._catch_up(sequences, limits)
            needs = Needs.any_of(sequence.sampling.needs for sequence in sequences)
            result = self._run(self._fill(sequences, limits, shape), shape, needs)
            numbers = _numbers_to_host(result.numbers[: len(sequences)])
            logprobs = result.logprobs
            if logprobs is not None:
                num_rows = len(sequences) * (numbers.shape[1] - _COUNTS)
                logprobs = Logprobs(*(to_host(each[:num_rows]) for each in logprobs))
        for sequence in sequences:
            is_missed = shape.num_steps == 0 or sequence.num_missed > MAX_MISSED
            if is_missed and self.drafter is not None and self.drafter.has_kv:
                sequence.num_missed += 1  # nothing is accepted then
        event = recorded_event(self.engine.device)
        return Submitted(list(sequences), shape, list(limits), numbers, logprobs, event, num_caught_up)

    def collect(self, submitted: Submitted) -> list[Accepted | None]:
        """Wait for a round. Rounds are collected in the order in which they were submitted. The caller appends the
        tokens, of which the last has no KV yet. None for a sequence that was released meanwhile."""
        if submitted.event is not None:
            submitted.event.synchronize()
        results = self._read(submitted)
        for accepted in results:
            if accepted is not None and accepted.num_drafted:
                self.stats.count(accepted)
        return results

    def reads_tokens(self, sequences: Sequence[Running], shape: DraftShape) -> bool:
        """Whether a round of these needs to know on the host what the round before brought."""
        if shape.num_steps == 0:
            return False
        return isinstance(self.drafter, NgramDrafter) or self.num_missed(sequences) > 0

    def num_missed(self, sequences: Sequence[Running]) -> int:
        """Rows that the drafter must catch up on before it drafts for these sequences."""
        return sum(each.num_missed for each in sequences if each.num_missed <= MAX_MISSED)

    def measure(self, num_seqs: int, num_steps: int) -> float:
        """Seconds of a round of `num_seqs` sequences that are padding, the host's part included."""
        started = time.monotonic()
        self.run([self._nobody()] * num_seqs, self.shape.with_steps(num_steps), [0] * num_seqs)
        return time.monotonic() - started

    def recompute(self, sequences: Sequence[Running], rows: Sequence[BatchRow], hidden: Tensor | None) -> None:
        """After a preemption: tokens of `sequences` were computed again, as `rows` say, with these extend states
        [num_tokens, width]. Only KV is made anew: the slot has kept the state, which is of the same tokens, and draft
        KV that depends on tokens not known yet is stored anew by the next `observe`."""
        if self.drafter is None:
            return
        chunks = [
            PromptChunk(each.token_ids, row.position, row.position + len(row.input_ids), each.pages)
            for each, row in zip(sequences, rows, strict=True)
        ]
        with torch.inference_mode():
            self.drafter.observe_prompt(chunks, hidden)

    def _nobody(self, num_missed: int = 0) -> _Padding:
        """In the padding page, as long as catching up needs it."""
        known = [0] * (2 + num_missed + (self.engine.speculation.hidden.num_target_rows if num_missed else 0))
        sampling = SamplingState(_MEASURED, known, vocab_size=self.engine.model_config.vocab_size)
        pages = [0] * -(-len(known) // self.engine.pool.page_size)
        return _Padding(self.slots.padding, known, pages, sampling, num_missed)

    def _run(self, inputs: RoundInputs, shape: DraftShape, needs: Needs) -> RoundResult:
        """By a graph, where the inputs are a bucket's and there are graphs."""
        if self._graphs is not None and len(inputs.slots) in self._buckets:
            return self._graphs.replay(inputs, shape, needs)
        return run_round(self.engine, self.drafter, self.slots, inputs.to(self.engine.device), shape, needs)

    def _run_captured(self, inputs: RoundInputs, shape: DraftShape, needs: Needs) -> RoundResult:
        if needs.processes:
            self.slots.allocate_all()
        return run_round(self.engine, self.drafter, self.slots, inputs, shape, needs)

    def _allocate(self, num_seqs: int, device: torch.device | str = "cpu", *, pinned: bool = False) -> RoundInputs:
        max_steps = max(1, self.shape.num_steps)
        return RoundInputs.allocate(num_seqs, self._num_columns, max_steps, device, pinned=pinned)

    def _allocate_two(self, num_seqs: int) -> list[RoundInputs]:
        """Of a bucket, to be used in turns: the device may not have read one yet when the next round's is written."""
        pinned = self.engine.device.type == "cuda"
        return [self._allocate(num_seqs, pinned=pinned) for _ in range(2)]

    def _fill(self, sequences: Sequence[Running], limits: Sequence[int], shape: DraftShape) -> RoundInputs:
        """The smallest bucket that holds the batch, or inputs of its own size, filled; all beyond it is padding."""
        num_seqs = len(sequences)
        size = next((each for each in self._buckets if each >= num_seqs), num_seqs)
        if size in self._buckets:
            self._buckets[size].rotate()
            inputs = self._buckets[size][0]
        else:
            inputs = self._allocate(size)
        num_columns = min(max(len(sequence.pages) for sequence in sequences) + self._num_spare, self._num_columns)
        inputs = inputs.using(num_columns)
        slots, most, missed = inputs.slots.numpy(), inputs.limits.numpy(), inputs.missed_rows.numpy()
        table = inputs.block_table[:, :num_columns].numpy()
        slots[:num_seqs] = [_slot(sequence) for sequence in sequences]
        most[:num_seqs] = limits
        missed[:num_seqs] = [self.slots.missed_row(_slot(sequence), sequence.num_missed) for sequence in sequences]
        for row, sequence in enumerate(sequences):
            num_pages = len(sequence.pages)
            table[row, :num_pages] = sequence.pages
            table[row, num_pages:] = 0
        padding = self.slots.padding
        slots[num_seqs:], most[num_seqs:], table[num_seqs:] = padding, 0, 0
        missed[num_seqs:] = self.slots.missed_row(padding, 0)
        if isinstance(self.drafter, NgramDrafter) and shape.num_steps:
            found = [
                self.drafter.lookup(_slot(sequence), sequence.token_ids, sequence.salt, shape.num_steps)
                for sequence in sequences
            ]
            inputs.proposed[:num_seqs, : shape.num_steps] = torch.tensor(found, dtype=torch.int64)
        return inputs

    def _read(self, submitted: Submitted) -> list[Accepted | None]:
        sequences, limits = submitted.sequences, submitted.limits
        num_rows = submitted.numbers.shape[1] - _COUNTS
        logprobs: list[TokenLogprobs | None] = [None] * (len(sequences) * num_rows)
        if submitted.logprobs is not None:
            asked = [sequence.sampling.params.num_logprobs for sequence in sequences for _ in range(num_rows)]
            logprobs = submitted.logprobs.to_rows(asked)
        results: list[Accepted | None] = []
        for row, (num_accepted, num_valid, *tokens) in enumerate(submitted.numbers.tolist()):
            if sequences[row].slot is None:
                results.append(None)
                continue
            count, start = min(num_accepted + 1, num_valid), row * num_rows
            num_drafted = min(limits[row], num_rows - 1)
            results.append(Accepted(tokens[:count], logprobs[start : start + count], num_accepted, num_drafted))
        return results

    def _catch_up(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[int]:
        """Run the drafter over the rows that rounds without drafts left out; a sequence that lacks too many, or wants
        no drafts, is left behind for good. Returns the limits that hold then."""
        late = [sequence for sequence in sequences if 0 < sequence.num_missed <= MAX_MISSED]
        for sequence in late:
            if sequence.sampling.params.draft_steps == 0:
                sequence.num_missed = MAX_MISSED + 1
        late = [sequence for sequence in late if sequence.num_missed <= MAX_MISSED]
        if late and self.drafter is not None:
            self._observe_missed(self.drafter, late)
        return [
            0 if sequence.num_missed > MAX_MISSED else limit for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def _observe_missed(self, drafter: Drafter, late: Sequence[Running]) -> None:
        """As prompts whose first rows are computed: those since the last `observe`, and those that its proposals stood
        in for. The device waits meanwhile, so it is asked for everything of all sequences at once."""
        slots, nums_missed = [_slot(sequence) for sequence in late], [sequence.num_missed for sequence in late]
        index = to_device(torch.tensor(slots), self.engine.device)
        after = to_device(torch.tensor([sequence.token_ids[-1] for sequence in late]), self.engine.device)
        missed, before = self.slots.missed(slots, nums_missed), self.slots.draft(index).rows
        states = None if missed is None else list(missed.split(nums_missed))
        chunks: list[PromptChunk] = []
        tails: list[PromptTail] = []
        for row, sequence in enumerate(late):
            known = sequence.token_ids[:-1]
            num_before = 0
            if states is not None and before is not None:
                num_before = min(before.shape[1], len(known) - sequence.num_missed)
                states[row] = torch.cat([before[row, before.shape[1] - num_before :], states[row]])
            chunks.append(PromptChunk(known, len(known) - sequence.num_missed - num_before, len(known), sequence.pages))
            tails.append(PromptTail(known, sequence.pages, None if states is None else states[row][:-1]))
            sequence.num_missed = 0
        hidden = last = None
        if states is not None:
            hidden = torch.cat(states)
            ends = torch.tensor([len(each) for each in states]).cumsum(0)
            last = hidden.index_select(0, to_device(ends - 1, self.engine.device))
        drafter.observe_prompt(chunks, hidden)
        needs = Needs.any_of(sequence.sampling.needs for sequence in late)
        sampling = self.slots.read(index, index.new_zeros(len(late), 0), needs).sampling
        draft = drafter.finish_prompt(tails, after, last, sampling)
        if draft.present():
            self.slots.load_draft(index, draft)


def _slot(sequence: Running) -> int:
    assert sequence.slot is not None, "the sequence was not admitted"
    return sequence.slot


def _numbers_to_host(numbers: Tensor) -> Tensor:
    """`to_host` of what every round brings. Every round is collected, so its memory stays until the copy is done."""
    if not gpu.compiled(numbers):
        return to_host(numbers)
    from ..kernels.triton_copies import copy_numbers_

    return copy_numbers_(torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda), numbers)
