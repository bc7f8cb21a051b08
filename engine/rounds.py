"""Rounds of an engine's running sequences: what the host does for run_round (round.py).

A round is submitted and collected. On a CUDA device the two are apart: the host can submit a round while the one before
runs, knowing of every sequence only the most that it may have brought, because what a round must know exactly lies in
the slots. Whatever is done to slots and pages between two rounds is ordered with them by the device's stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels import gpu
from ..metadata.wire.request import SamplingParams, TokenLogprobs
from .copies import recorded_event, to_host
from .draft_shape import DraftShape
from .drafters.base import Drafter, DraftState, PromptChunk
from .drafters.ngram import NgramDrafter
from .engine import Engine
from .graphs import GREEDY, SAMPLED, CatchUp, RoundGraphs
from .logprobs import Logprobs
from .progress import Progress
from .round import RoundResult, catch_up, run_round
from .round_inputs import RoundInputs
from .sampling_state import Needs, SamplingState
from .slots import Slots
from .work import MAX_MISSED, Accepted, BatchRow

_MEASURED = SamplingParams(max_tokens=1, temperature=0.0)
_COUNTS = 2  # numbers of a row before its tokens


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
    inputs: list[RoundInputs]  # on the host, which stay as they are until `event` has happened
    numbers: Tensor  # of RoundResult, on the host likewise
    logprobs: Logprobs | None  # likewise
    event: torch.cuda.Event | None  # None where the device is the host
    num_caught_up: int  # rows that the drafter had not seen before


class Running(Protocol):
    """The part of a sequence that rounds use."""

    slot: int | None
    token_ids: list[int]  # the last one is the bonus token
    pages: list[int]
    sampling: SamplingState
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
        self._catch_ups = _catch_ups(self.drafter)
        # Inputs that are free, of each bucket: the device may not have read those of a round, and of catching up before
        # it, when the next round's are written.
        self._buckets = {
            size: [self._allocate(size) for _ in range(2 + bool(self._catch_ups))] for size in sorted(buckets)
        }
        self._graphs: RoundGraphs[RoundResult | None] | None = None

    def warm_up(self, progress: Progress | None = None) -> None:
        """Whatever is compiled or loaded when it is used first, so that no sequence waits for it. On CUDA: graphs of
        all buckets for requests without filters and penalties, which `progress` counts; others are captured when they
        come."""
        if gpu.compiled(self.engine.kv):
            inputs = [self._allocate_on(self.engine.device, size) for size in self._buckets]
            shapes = [self.shape.with_steps(steps) for steps in self.shape.choices]
            with torch.inference_mode():
                self._graphs = RoundGraphs(self._run_captured, inputs, self.slots.padding)
                self._graphs.capture([*shapes, *self._catch_ups], (GREEDY, SAMPLED), progress)
            self.measure(1, 0)  # compiles what surrounds a graph
            return
        with torch.inference_mode():
            for work in self._catch_ups:
                inputs = self._fill([self._nobody()], [0], [0])
                self._run(inputs, work, GREEDY)
                self._free(inputs)

    def admit(self, sequence: Running, length: int, draft: DraftState | None) -> None:
        """Give a sequence a slot: `length` tokens have KV, one more is known."""
        sequence.slot = self.slots.take()
        with torch.inference_mode():  # as rounds, which may have allocated columns
            self.slots.load(sequence.slot, length, sequence.token_ids[-1], sequence.sampling, draft)

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
        num_caught_up, used = 0, list[RoundInputs]()
        with torch.inference_mode():
            needs = Needs.any_of(sequence.sampling.needs for sequence in sequences)
            if shape.num_steps:
                limits = self._leave_behind(sequences, limits)
                num_caught_up = self.num_missed(sequences)
                used = self._catch_up(sequences, needs)
            used.append(self._fill(sequences, limits, [sequence.num_missed for sequence in sequences]))
            if isinstance(self.drafter, NgramDrafter) and shape.num_steps:
                self._propose(self.drafter, used[-1], sequences, shape.num_steps)
            result = self._run(used[-1], shape, needs)
            assert result is not None, shape
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
        return Submitted(list(sequences), shape, list(limits), used, numbers, logprobs, event, num_caught_up)

    def collect(self, submitted: Submitted) -> list[Accepted | None]:
        """Wait for a round. Rounds are collected in the order in which they were submitted. The caller appends the
        tokens, of which the last has no KV yet. None for a sequence that was released meanwhile."""
        if submitted.event is not None:
            submitted.event.synchronize()
        for inputs in submitted.inputs:
            self._free(inputs)
        results = self._read(submitted)
        for accepted in results:
            if accepted is not None and accepted.num_drafted:
                self.stats.count(accepted)
        return results

    def reads_tokens(self, shape: DraftShape) -> bool:
        """Whether a round needs to know on the host what the round before brought."""
        return shape.num_steps > 0 and isinstance(self.drafter, NgramDrafter)

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

    def _nobody(self) -> _Padding:
        sampling = SamplingState(_MEASURED, [0, 0], vocab_size=self.engine.model_config.vocab_size)
        return _Padding(self.slots.padding, [0, 0], [0], sampling)

    def _run(self, inputs: RoundInputs, work: DraftShape | CatchUp, needs: Needs) -> RoundResult | None:
        """By a graph, where the inputs are a bucket's and there are graphs. The result of a round, None of others."""
        if self._graphs is not None and len(inputs.slots) in self._buckets:
            return self._graphs.replay(inputs, work, needs)
        return self._compute(inputs.to(self.engine.device), work, needs)

    def _run_captured(self, inputs: RoundInputs, work: DraftShape | CatchUp, needs: Needs) -> RoundResult | None:
        if needs.processes:
            self.slots.allocate_all()
        return self._compute(inputs, work, needs)

    def _compute(self, inputs: RoundInputs, work: DraftShape | CatchUp, needs: Needs) -> RoundResult | None:
        if isinstance(work, DraftShape):
            return run_round(self.engine, self.drafter, self.slots, inputs, work, needs)
        assert self.drafter is not None
        catch_up(self.drafter, self.slots, inputs, work.num_rows, needs)
        return None

    def _allocate_on(self, device: torch.device | str, num_seqs: int, *, pinned: bool = False) -> RoundInputs:
        max_steps = max(1, self.shape.num_steps)
        return RoundInputs.allocate(num_seqs, self._num_columns, max_steps, device, pinned=pinned)

    def _allocate(self, num_seqs: int) -> RoundInputs:
        """Allocate inputs on the host."""
        return self._allocate_on("cpu", num_seqs, pinned=self.engine.device.type == "cuda")

    def _free(self, inputs: RoundInputs) -> None:
        """The device has read them."""
        self._buckets.get(len(inputs.slots), []).append(inputs)

    def _fill(self, sequences: Sequence[Running], limits: Sequence[int], missed: Sequence[int]) -> RoundInputs:
        """Inputs of the smallest bucket that holds the batch, or of its own size, filled; all beyond it is padding.
        `missed`: which of the rows that a sequence has missed, `missed_rows` is about."""
        num_seqs = len(sequences)
        size = next((each for each in self._buckets if each >= num_seqs), num_seqs)
        free = self._buckets.get(size)
        inputs = free.pop() if free else self._allocate(size)
        num_columns = min(max(len(sequence.pages) for sequence in sequences) + self._num_spare, self._num_columns)
        inputs = inputs.using(num_columns)
        slots, most, rows = inputs.slots.numpy(), inputs.limits.numpy(), inputs.missed_rows.numpy()
        table = inputs.block_table[:, :num_columns].numpy()
        slots[:num_seqs] = [_slot(sequence) for sequence in sequences]
        most[:num_seqs] = limits
        rows[:num_seqs] = [
            self.slots.missed_row(_slot(sequence), row) for sequence, row in zip(sequences, missed, strict=True)
        ]
        for row, sequence in enumerate(sequences):
            num_pages = len(sequence.pages)
            table[row, :num_pages] = sequence.pages
            table[row, num_pages:] = 0
        padding = self.slots.padding
        slots[num_seqs:], most[num_seqs:], table[num_seqs:] = padding, 0, 0
        rows[num_seqs:] = self.slots.missed_row(padding, 0)
        return inputs

    def _propose(
        self, drafter: NgramDrafter, inputs: RoundInputs, sequences: Sequence[Running], num_steps: int
    ) -> None:
        found = [drafter.lookup(_slot(each), each.token_ids, each.salt, num_steps) for each in sequences]
        inputs.proposed[: len(sequences), :num_steps] = torch.tensor(found, dtype=torch.int64)

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

    def _leave_behind(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[int]:
        """Sequences that lack too many rows are left behind for good, and those that lack some and want no drafts.
        Returns the limits that hold then."""
        for sequence in sequences:
            if 0 < sequence.num_missed <= MAX_MISSED and sequence.sampling.params.draft_steps == 0:
                sequence.num_missed = MAX_MISSED + 1
        return [0 if each.num_missed > MAX_MISSED else limit for each, limit in zip(sequences, limits, strict=True)]

    def _catch_up(self, sequences: Sequence[Running], needs: Needs) -> list[RoundInputs]:
        """Run the drafter over the rows that rounds without drafts left out, oldest first, as many at a time as a round
        brings. Returns the inputs that the device reads."""
        used: list[RoundInputs] = []
        late = [sequence for sequence in sequences if 0 < sequence.num_missed <= MAX_MISSED]
        done = 0
        while late:
            work = self._catch_ups[any(sequence.num_missed > done + 1 for sequence in late)]
            lacking = [sequence.num_missed - done for sequence in late]
            used.append(self._fill(late, lacking, [done] * len(late)))
            self._run(used[-1], work, needs._replace(num_logprobs=None))
            done += work.num_rows
            for sequence in late:
                if sequence.num_missed <= done:
                    sequence.num_missed = 0
            late = [sequence for sequence in late if sequence.num_missed]
        return used


def _catch_ups(drafter: Drafter | None) -> list[CatchUp]:
    """What catching up is done by: one row after a round that only measured, or as many as a round brings at most."""
    if drafter is None or not drafter.has_kv:
        return []
    return [CatchUp(1), CatchUp(drafter.shape.num_steps + 1)]


def _slot(sequence: Running) -> int:
    assert sequence.slot is not None, "the sequence was not admitted"
    return sequence.slot


def _numbers_to_host(numbers: Tensor) -> Tensor:
    """`to_host` of what every round brings. Every round is collected, so its memory stays until the copy is done."""
    if not gpu.compiled(numbers):
        return to_host(numbers)
    from ..kernels.triton_copies import copy_numbers_

    return copy_numbers_(torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda), numbers)
