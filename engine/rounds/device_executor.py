"""The executor of a decode node for this process's device: slots, block tables, inputs and graphs of rounds.

    Round   --> inputs on the host --> run_round, directly or as a graph --> numbers on the host --> RoundTokens
    CatchUp --> inputs on the host --> catch_up, likewise
    Recompute --> local_prompts.py --> Scores, if tokens are scored

A chunk beside a round shares the round's forward on a CPU. On CUDA it does so if graphs hold both and the padding costs
less than a forward of its own. Otherwise the chunk is computed first, and then the round.

All work runs on the device in the order of submission. `submit` does not wait for the device, `collect` does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.operations import captures
from ...kernels.state.rows import copy_numbers_
from ...metadata.errors import ChunkOutOfMemory, ConfigError, OutOfMemory, RankLost
from ...metadata.handoff.schema.buffers import MetadataBuffers, Sampled
from ...metadata.wire.request import SamplingParams, TokenLogprobs
from ..config import SHARING
from ..device import recorded_event, to_device, to_host
from ..drafters.base import get_draft
from ..engine import Engine
from ..pace.draft_length import DraftShape
from ..pace.mixed_sizes import EVERY_SIZE, MixedSize, MixedSizes, mixed_sizes, sizes_alone
from ..pace.padding import padding_catch_up, padding_chunk, padding_round
from ..progress import Progress
from ..prompts.local_prompts import LocalPrompts
from ..prompts.prompts import SubmittedScores
from ..ranks.agreement import Agreed
from ..sampling.grammar import Matcher, RoundMasks
from ..sampling.logprobs import Logprobs
from ..sampling.state import Needs, SamplingState, each_kind
from ..state.tail_pages import Windows
from ..work import (
    Accepted,
    CatchUp,
    LoadSlot,
    Masking,
    Recompute,
    Round,
    RoundTokens,
    RoundWork,
    Scores,
    catch_up_sizes,
    widened,
)
from .batch import ForwardBatch
from .executor import HostProposer
from .graphs import RoundGraphs, graph_sizes
from .inputs import Buckets, InputBlock
from .round import RoundResult, catch_up, propose, read, run_round, settle, verify
from .slots import Slots
from .step_graphs import StepGraphs
from .trees import Drafts

_COUNTS = 2  # numbers of a row before its tokens


class _Scored(NamedTuple):
    """Log-probabilities of prompt tokens that the device computes or has computed."""

    begun: float  # monotonic seconds
    scores: SubmittedScores
    event: torch.cuda.Event | None  # None: the device is the host


class _UnderWay(NamedTuple):
    """A round that the device computes or has computed."""

    work: Round
    inputs: list[InputBlock]  # on the host, which stay as they are until `event` has happened
    numbers: Tensor  # of RoundResult, on the host likewise
    logprobs: Logprobs | None  # likewise
    event: torch.cuda.Event | None  # None: the device is the host
    matchers: list[Matcher | None]  # of the sequences, if any has a grammar, until they have accepted the tokens
    broken: set[int]  # rows whose grammar was broken then
    masking: Masking | None  # None: no sequence has a grammar


class _Graphs(NamedTuple):
    """The graphs of all buckets, which share their inputs and their memory."""

    rounds: RoundGraphs[DraftShape, RoundResult]
    catching_up: RoundGraphs[int, None]
    steps: StepGraphs | None  # None: ranks with sequences of their own have none


class DeviceExecutor:
    """Runs rounds of one engine, with its drafter if it has one. One thread. An `Executor`."""

    def __init__(self, engine: Engine, num_slots: int, buckets: Sequence[int] = ()) -> None:
        """`buckets`: batch sizes whose inputs are static."""
        self.engine = engine
        self.drafter = engine.drafter
        self.shape = DraftShape(0) if self.drafter is None else self.drafter.shape
        self.num_slots = num_slots
        self.slots = Slots(num_slots, engine.model_config.vocab_size, self.drafter, engine.device, engine.row_shares)
        num_tokens = engine.context_len + 2 * self.shape.num_slots + engine.speculation.hidden.num_target_rows
        page_size = engine.pool.page_size
        self.buckets = Buckets(
            buckets,
            2 + self.keeps_missed_rows,  # of two rounds under way, and of catching up before the second
            num_slots=num_slots,
            num_columns=-(-num_tokens // page_size) + 1,
            num_spare=-(-2 * self.shape.num_slots // page_size) + 1,
            max_steps=self.shape.num_steps,
            device=engine.device,
            has_tails=engine.tail_window > 0,
        )
        self._masks = RoundMasks(engine.grammars, pinned=engine.kind.is_apart)
        self._graphs: _Graphs | None = None
        self._used: list[InputBlock] = []  # by work since the last round
        self._under_way: deque[_UnderWay] = deque()
        self._idle: deque[_UnderWay] = deque()  # rounds of other ranks, in which this one has no sequence
        self._row_buffer = MetadataBuffers(engine.schema)
        self._local_prompts = LocalPrompts(engine, self.slots)
        self._masking: Masking | None = None  # of the round that is submitted now
        self._scored: _Scored | None = None  # of the last Recompute
        self._chunks_ahead: deque[torch.cuda.Event] = deque()  # of Recomputes, each when it is computed
        self.group_steps = engine.group_steps
        if self.group_steps is not None:
            self.group_steps.prepare(
                self._run_idle,
                lambda: engine.prompt_sizes,
                self.shape,
                buckets,
                joins_chunks=not self._captures,
                has_room=engine.has_room,
            )

    @property
    def keeps_missed_rows(self) -> bool:
        return self.drafter is not None and self.drafter.has_kv

    @property
    def num_prompt_states(self) -> int:
        return self._local_prompts.num_states

    @property
    def proposer(self) -> HostProposer | None:
        return None if self.drafter is None else self.drafter.proposer

    @property
    def vocab_size(self) -> int:
        return self.engine.model_config.vocab_size

    @property
    def context_len(self) -> int:
        return self.engine.context_len

    @property
    def windows(self) -> Windows:
        return self.engine.windows

    @property
    def _captures(self) -> bool:
        return captures(self.engine.device)

    @property
    def runs_ahead(self) -> bool:
        return self.engine.kind.is_apart

    @property
    def mixed_sizes(self) -> MixedSizes:
        if not self._captures:
            return EVERY_SIZE
        steps = None if self._graphs is None else self._graphs.steps
        return MixedSizes(() if steps is None else steps.sizes, self.shape)

    def warm_up(self, progress: Progress | None = None, *, expects_prompts: bool = False) -> None:
        """Capture, on CUDA, the graphs of all buckets for every kind of sampling, so that service captures none and
        allocates nothing. `progress` counts them. On a CPU, catch up once. Raises ConfigError if the graphs find no
        memory.

        `expects_prompts`: also capture graphs of rounds with chunks beside them, and of chunks alone."""
        sizes = catch_up_sizes(self.shape) if self.keeps_missed_rows else ()
        if self._captures:
            shapes = [self.shape.with_steps(steps) for steps in self.shape.choices]
            self._graphs = self._capture(shapes, sizes, progress, expects_prompts=expects_prompts)
            if expects_prompts:
                self._capture_prompts(progress)
            self._load_each_kind()
            self.submit(padding_round(self.num_slots, 1, self.shape.with_steps(0)))  # compiles what surrounds a graph
            self.collect()
            self._warm_up_mixed()
            return
        for num_rows in sizes:
            self.submit(padding_catch_up(self.num_slots, num_rows))
        self._free_used()

    def _warm_up_mixed(self) -> None:
        """Run a chunk of one half of the ranks of a group beside rounds of the other, and the other way round: no graph
        holds them."""
        if self.group_steps is None:
            return
        page_size = self.engine.pool.page_size
        for turn, num_steps in product(range(2), sorted({0, self.shape.num_steps})):
            if (self.group_steps.board.rank + turn) % 2:
                self.submit(padding_chunk(page_size, page_size))
                self.wait_chunks()
            else:
                self.submit(padding_round(self.num_slots, 1, self.shape.with_steps(num_steps)))
                self.collect()

    def rehearse(self, *, expects_prompts: bool = False) -> None:
        """Capture the largest graphs that `warm_up` captures, and keep none. They take as much memory as all of them,
        since smaller ones fit in theirs. Raises as `warm_up`."""
        if self._captures:
            sizes = catch_up_sizes(self.shape) if self.keeps_missed_rows else ()
            kept = self._capture([self.shape], sizes[-1:], of_largest=True, expects_prompts=expects_prompts)
            if expects_prompts:
                self._capture_prompts()
            del kept  # until now, since a node holds all of them at once

    def _capture_prompts(self, progress: Progress | None = None) -> None:
        with suppress(torch.OutOfMemoryError):
            return self.engine.capture_prompts(progress)
        raise ConfigError(
            f"the GPU has no memory for the graphs of prompts; start with --no-expect-prompts, or {SHARING}"
        )

    def _capture(
        self,
        shapes: Sequence[DraftShape],
        num_rows: Sequence[int],
        progress: Progress | None = None,
        *,
        of_largest: bool = False,
        expects_prompts: bool = False,
    ) -> _Graphs:
        """Return graphs of rounds, and of catching up on `num_rows` rows, of all buckets, or `of_largest` alone. Raises
        ConfigError if they find no memory."""
        with suppress(torch.OutOfMemoryError):
            self.slots.allocate_all()
            blocks = self.buckets.allocate_on_device()
            pool, steps = torch.cuda.graph_pool_handle(), None
            shared = blocks[-1:] if of_largest else blocks, self.slots.padding, pool
            rounds = RoundGraphs("rounds", self._captured_round, *shared)
            catching_up = RoundGraphs("catching up", self._catch_up, *shared)
            if self.group_steps is None:
                alone = sizes_alone(self.buckets.sizes, self.shape)
                mixed = mixed_sizes(self.buckets.sizes, self.shape) if expects_prompts else []
                sizes = [*mixed[-1:], *alone[-1:]] if of_largest else [*mixed, *alone]
                steps = StepGraphs(self.engine, self.drafter, self.slots, blocks, sizes, pool)
            with torch.inference_mode():
                rounds.capture(shapes, progress)
                if num_rows:
                    catching_up.capture(num_rows, progress)
                if steps is not None:
                    steps.capture(progress)
            return _Graphs(rounds, catching_up, steps)
        raise ConfigError(
            f"the GPU has no memory left for graphs of rounds of {self.num_slots} sequences; lower max_running (or "
            f"num_pages if it is given), or {SHARING}"
        )

    def submit(self, work: RoundWork) -> None:
        """Ask the device for `work`, as `Executor.submit`."""
        with suppress(torch.OutOfMemoryError):
            with torch.inference_mode():
                match work:
                    case Round():
                        self._under_way.append(self._submit_round(self._agreed(work)))
                    case CatchUp():
                        self._submit_catch_up(work)
                    case LoadSlot():
                        self._load(work)
                    case Recompute():
                        if self.group_steps is not None:
                            self.group_steps.begin_chunk(work.rows)
                        self._recompute(work)
            return
        self._drop_unshared()
        if not isinstance(work, LoadSlot):
            self._check_alone(work)
        raise OutOfMemory(_no_memory(work))  # here the error is gone, whose traceback holds tensors

    @property
    def is_done(self) -> bool:
        event = self._under_way[0].event
        return event is None or event.query()

    def collect(self) -> RoundTokens:
        """Wait for the oldest round that was not collected, and return its report."""
        return self._finish(self._under_way.popleft())

    def _finish(self, done: _UnderWay) -> RoundTokens:
        if done.event is not None:
            done.event.synchronize()
        _accept(done)
        for inputs in done.inputs:
            self.buckets.free(inputs)
        self.engine.check()
        return _report(done)

    @property
    def num_chunks_ahead(self) -> int:
        while self._chunks_ahead and self._chunks_ahead[0].query():
            self._chunks_ahead.popleft()
        return len(self._chunks_ahead)

    def wait_chunks(self) -> None:
        """Wait until every submitted Recompute is computed."""
        for event in self._chunks_ahead:
            event.synchronize()
        self._chunks_ahead.clear()
        self.engine.check()

    def collect_scores(self) -> Scores:
        """Wait for the last Recompute, which had scored tokens, and return its report, once."""
        done, self._scored = self._scored, None
        assert done is not None, "the last Recompute had no scored tokens, or was collected"
        if done.event is not None:
            done.event.synchronize()
        self.engine.check()
        return Scores(done.begun, time.monotonic(), done.scores.read())

    def run_round(self, block: InputBlock, shape: DraftShape, needs: Needs) -> RoundResult:
        """Run a round with filled inputs, by a graph if the block is a bucket's and there are graphs."""
        if self._graphs is not None and block.num_seqs in self.buckets.sizes and self._fits(block, shape):
            result = self._graphs.rounds.replay(block, shape, needs)
            self.engine.end_forward()
            return result
        return self._round(block.to(self.engine.device), shape, needs)

    def _fits(self, block: InputBlock, shape: DraftShape) -> bool:
        """Whether every rank has as many rows as in the graph of a round."""
        return set(self.engine.lens) <= {block.num_seqs * (shape.num_drafts + 1)}

    def read_row(self, row: bytes) -> Sampled:
        """Return the first token of a metadata row. Raises ProtocolError if a peer's row cannot be used."""
        self._row_buffer.unpack(row)
        return self._row_buffer.get_sampled(self.vocab_size)

    def expect(self, grammar: str) -> None:
        """Prepare for a request with this grammar, without waiting."""
        self.engine.grammars.prepare(grammar)

    # --- work ---

    def _agreed(self, work: Round) -> Round:
        """Return the round as the ranks of a group have agreed to run it."""
        if self.group_steps is None:
            return work
        agreed = self.group_steps.begin_round(
            len(work.slots), work.shape, () if work.beside is None else work.beside.rows
        )
        wider = widened(work, self.shape.with_steps(agreed.num_steps))
        return replace(wider, least_seqs=agreed.least_seqs)

    def _run_idle(self, agreed: Agreed) -> None:
        """Take part in a forward of other ranks without a sequence: in a round of theirs on padding, so that this rank
        replays the graph that they do, otherwise without rows."""
        if not agreed.has_rounds:
            self.engine.compute_nothing()
            return
        shape = self.shape.with_steps(agreed.num_steps)
        work = Round([], [], [], [], [], shape, Needs(), [], least_seqs=agreed.least_seqs)
        with torch.inference_mode():
            self._idle.append(self._submit_round(work))
        while len(self._idle) > self.runs_ahead:
            self._finish(self._idle.popleft())

    def _submit_round(self, work: Round) -> _UnderWay:
        if work.beside is None:
            work = self._widened(work)
            block = self.buckets.fill_round(work)
            self._used.append(block)
            result = self._run_alone(block, work)
        else:
            work, result = self._run_both(work, work.beside)
        numbers = self._to_host(result.numbers[: len(work.slots)])
        logprobs = result.logprobs
        if logprobs is not None:
            num_rows = len(work.slots) * (numbers.shape[1] - _COUNTS)
            logprobs = Logprobs(*(to_host(each[:num_rows]) for each in logprobs))
        used, self._used = self._used, []
        matchers = self._masks.of(work.slots) if work.needs.masks else []
        masking, self._masking = self._masking if work.needs.masks else None, None
        return _UnderWay(work, used, numbers, logprobs, recorded_event(self.engine.device), matchers, set(), masking)

    def _widened(self, work: Round) -> Round:
        """Return the round as it is computed without a chunk. If it has grammars, its steps are graphs of a fixed
        number of drafts, so it gets as many."""
        has_graphs = self._graphs is not None and self._graphs.steps is not None
        return widened(work, self.shape) if has_graphs and work.needs.masks and work.shape.num_steps else work

    def _run_alone(self, block: InputBlock, work: Round) -> RoundResult:
        """Run a round that has no chunk beside it, or whose chunk is computed."""
        if not work.needs.masks:
            return self.run_round(block, work.shape, work.needs)
        steps = None if self._graphs is None else self._graphs.steps
        if steps is not None and block.num_seqs in self.buckets.sizes:
            size = steps.alone(block.num_seqs, work.shape)
            drafts, event = steps.propose(size, block, work.needs).to_host(), recorded_event(self.engine.device)
            steps.verify(size)
            return steps.settle(size, work.needs, self._allowed(work, drafts, event))
        inputs = block.to(self.engine.device).for_round
        proposed = propose(self.drafter, self.slots, inputs, work.shape, work.needs)
        drafts, event = proposed.drafts.to_host(), recorded_event(self.engine.device)
        verified = verify(self.engine, proposed)
        allowed = self._allowed(work, drafts, event)
        assert allowed is not None
        return settle(
            self.engine,
            self.drafter,
            self.slots,
            inputs,
            proposed,
            verified,
            work.shape,
            work.needs,
            to_device(allowed, self.engine.device),
        )

    def _allowed(self, work: Round, drafts: Drafts, event: torch.cuda.Event | None) -> Tensor | None:
        """Return the tokens that each node of a round may be, as for `settle`, but on the host. `drafts` are there
        after `event`. None: no sequence has a grammar."""
        if not work.needs.masks:
            return None
        verified = recorded_event(self.engine.device)
        if event is not None:
            event.synchronize()
        begun = time.monotonic()
        for before in self._under_way:
            _accept(before)
        allowed = self._masks.fill(self._masks.of(work.slots), drafts.tokens, drafts.parents)
        self._masking = Masking(time.monotonic() - begun, verified is None or verified.query())
        return allowed

    def _run_both(self, work: Round, chunk: Recompute) -> tuple[Round, RoundResult]:
        """Submit a round and the chunk beside it. Return the round as it was submitted, and its result. Raises
        ChunkOutOfMemory."""
        assert not chunk.is_scored, "scores of a chunk beside a round would not be collected"
        steps = None if self._graphs is None else self._graphs.steps
        size = None if steps is None else steps.fitting(work, chunk.rows)
        if size is not None:
            work = widened(work, size.shape)
            block = self.buckets.fill_round(work, size.num_seqs)
        else:
            work = self._widened(work)
            block = self.buckets.fill_round(work)
        self._used.append(block)
        ways: list[Callable[[], Callable[[], RoundResult]]] = [partial(self._begin_apart, block, work, chunk)]
        if steps is not None and size is not None:
            ways.insert(0, partial(self._begin_by_graphs, steps, size, block, work, chunk))
        elif not self._captures:
            ways.insert(0, partial(self._begin_mixed, block, work, chunk))
        if self.group_steps is not None:  # the ranks have agreed on one forward
            ways = ways[:1]
        for begin in ways:  # the way that needs less memory last
            settling = None
            with suppress(torch.OutOfMemoryError):
                settling = begin()
            if settling is not None:
                return work, settling()
        self._drop_unshared()
        self._check_alone(chunk)
        raise ChunkOutOfMemory(_no_memory(chunk))

    def _check_alone(self, work: RoundWork) -> None:
        """Raise RankLost if there was no memory for work for which other ranks of the group wait in a forward."""
        if self.group_steps is not None and self.group_steps.is_awaited:
            raise RankLost(f"{_no_memory(work)}, while other ranks wait in a forward")

    # Each way submits the chunk, and the round as far as they share the forward, and returns the rest of the round.
    # Until this is called, no slot of the round has changed.

    def _begin_apart(self, block: InputBlock, work: Round, chunk: Recompute) -> Callable[[], RoundResult]:
        """Compute the chunk first, and then the round."""
        self._local_prompts.compute(chunk)
        return partial(self._run_alone, block, work)

    def _begin_by_graphs(
        self, steps: StepGraphs, size: MixedSize, block: InputBlock, work: Round, chunk: Recompute
    ) -> Callable[[], RoundResult]:
        """Replay graphs that hold both."""
        drafts, event = steps.propose(size, block, work.needs), None
        if work.needs.masks:
            drafts, event = drafts.to_host(), recorded_event(self.engine.device)
        self._local_prompts.take(chunk, steps.verify(size, chunk.rows))
        return partial(steps.settle, size, work.needs, self._allowed(work, drafts, event))

    def _begin_mixed(self, block: InputBlock, work: Round, chunk: Recompute) -> Callable[[], RoundResult]:
        """Run one forward of both directly."""
        inputs = block.to(self.engine.device).for_round
        proposed = propose(self.drafter, self.slots, inputs, work.shape, work.needs)
        beside = ForwardBatch.build(chunk.rows, self.engine.pool.page_size, self.engine.device)
        verified = verify(self.engine, proposed, beside)
        self._local_prompts.take(chunk, verified.beside)
        # the chunk may have brought the drafter's state of sequences in the round
        proposed = proposed._replace(rows=read(self.drafter, self.slots, inputs, work.shape, work.needs))
        allowed = self._allowed(work, proposed.drafts, None)
        return partial(
            settle, self.engine, self.drafter, self.slots, inputs, proposed, verified, work.shape, work.needs, allowed
        )

    def _drop_unshared(self) -> None:
        """After work without memory, keep no inputs that belong to no bucket: they are used once, and the next work may
        have no memory either."""
        self._used = [block for block in self._used if block.num_seqs in self.buckets.sizes]

    def _recompute(self, work: Recompute) -> None:
        self._scored, begun = None, time.monotonic()
        scores = self._local_prompts.compute(work)
        event = recorded_event(self.engine.device)
        if event is not None:
            self._chunks_ahead.append(event)
        if scores is not None:
            self._scored = _Scored(begun, scores, event)

    def _submit_catch_up(self, work: CatchUp) -> None:
        block = self.buckets.fill_catch_up(work)
        self._used.append(block)
        if self._graphs is not None and block.num_seqs in self.buckets.sizes:
            self._graphs.catching_up.replay(block, work.num_rows, work.needs.of_drafts)
        else:
            self._catch_up(block.to(self.engine.device), work.num_rows, work.needs.of_drafts)

    def _to_host(self, numbers: Tensor) -> Tensor:
        """Return a copy of the numbers of a round, as `to_host`. Every round is collected, so its memory stays until
        the copy is done."""
        if not self._captures:
            return to_host(numbers)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=self.engine.kind.is_apart)
        return copy_numbers_(host, numbers)

    def _load_each_kind(self) -> None:
        """Load a slot for each kind of sampling, so that no request pays for the first kernels of its kind."""
        plain = SamplingState(SamplingParams(max_tokens=1), [0], [0], vocab_size=self.engine.model_config.vocab_size)
        for state in (*each_kind(plain.vocab_size), plain):  # the last one clears the columns
            self._load(LoadSlot(0, [0, 0], state))

    def _load(self, work: LoadSlot) -> None:
        if work.slot in self._local_prompts.kept:
            self._local_prompts.forget(work.slot)
        draft = None
        if self.drafter is not None and work.row is None:
            draft = self.drafter.allocate(1)
        elif self.drafter is not None and work.row is not None:
            self._row_buffer.unpack(work.row)
            draft = get_draft(self._row_buffer, self.drafter, work.token_ids)
        if work.sampling.params.grammar is not None or work.slot in self._masks.matchers:
            self._masks.load(work.slot, work.sampling)
        self.slots.load(work.slot, len(work.token_ids) - 1, work.token_ids[-1], work.sampling, draft)

    # --- steps on the device ---

    def _catch_up(self, block: InputBlock, num_rows: int, needs: Needs) -> None:
        assert self.drafter is not None
        catch_up(self.drafter, self.slots, block.for_catch_up, num_rows, needs)

    def _captured_round(self, block: InputBlock, shape: DraftShape, needs: Needs) -> RoundResult:
        """Run a round for its graph. All ranks capture the same graph, so all have as many rows."""
        self.engine.announce(block.num_seqs * (shape.num_drafts + 1))
        return self._round(block, shape, needs)

    def _round(self, block: InputBlock, shape: DraftShape, needs: Needs) -> RoundResult:
        return run_round(self.engine, self.drafter, self.slots, block.for_round, shape, needs)

    def _free_used(self) -> None:
        """Take back the inputs of work that no round follows."""
        for block in self._used:
            self.buckets.free(block)
        self._used.clear()


def executor_of(engine: Engine, num_slots: int) -> DeviceExecutor:
    """Return the executor of a node or of one of its ranks, with graphs if the device has them. All ranks have the same
    buckets, so they replay the same graphs."""
    return DeviceExecutor(engine, num_slots, graph_sizes(engine.kv, num_slots))


def _accept(done: _UnderWay) -> None:
    """Let the matchers of a round that is computed go on by its tokens, once."""
    if not done.matchers:
        return
    for row, (matcher, numbers) in enumerate(zip(done.matchers, done.numbers.tolist(), strict=True)):
        if matcher is None:
            continue
        if matcher.is_broken:
            done.broken.add(row)
        num_accepted, num_valid, *tokens = numbers
        matcher.accept(tokens[: min(num_accepted + 1, num_valid)])
    done.matchers.clear()


def _report(done: _UnderWay) -> RoundTokens:
    work, num_rows = done.work, done.numbers.shape[1] - _COUNTS
    logprobs: list[TokenLogprobs | None] = [None] * (len(work.slots) * num_rows)
    if done.logprobs is not None:
        logprobs = done.logprobs.to_rows([num for num in work.num_logprobs for _ in range(num_rows)])
    rows: list[Accepted] = []
    for row, (num_accepted, num_valid, *tokens) in enumerate(done.numbers.tolist()):
        count, start = 0 if row in done.broken else min(num_accepted + 1, num_valid), row * num_rows
        num_drafted = min(work.limits[row], num_rows - 1)
        rows.append(Accepted(tokens[:count], logprobs[start : start + count], num_accepted, num_drafted))
    return RoundTokens(rows, done.masking)


def _no_memory(work: RoundWork) -> str:
    match work:
        case Round():
            what = f"a round of {len(work.slots)} sequences with {work.shape.num_drafts} drafts each"
        case CatchUp():
            what = f"the drafter to catch up on {work.num_rows} rows of {len(work.slots)} sequences"
        case LoadSlot():
            what = "the sampling parameters of a sequence"
        case Recompute():
            what = f"{sum(len(row.input_ids) for row in work.rows)} tokens of prompts"
    return f"the decode node's device has no memory left for {what}; send fewer requests at once, or lower max_running"
