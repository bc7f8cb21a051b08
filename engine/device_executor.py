"""The executor of a decode node for this process's device: slots, block tables, inputs and graphs of rounds.

    Round   --> inputs on the host --> run_round, directly or as a graph --> numbers on the host --> Tokens
    CatchUp --> inputs on the host --> catch_up, likewise
    Recompute --> local_prompts.py --> Scores, if tokens are scored

All work runs on the device in the order of submission. `submit` does not wait for the device, `collect` does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.copies import copy_numbers_
from ..kernels.operations import captures
from ..metadata.errors import ConfigError, OutOfMemory
from ..metadata.handoff.buffers import MetadataBuffers, Sampled
from ..metadata.wire.request import TokenLogprobs
from .buckets import Buckets
from .config import SHARING
from .copies import recorded_event, to_host
from .draft_row import get_draft
from .draft_shape import DraftShape
from .engine import Engine
from .executor import HostProposer
from .graphs import RoundGraphs
from .local_prompts import LocalPrompts
from .logprobs import Logprobs
from .progress import Progress
from .prompt_scores import SubmittedScores
from .round import RoundResult, catch_up, run_round
from .round_inputs import InputBlock
from .round_timing import padding_catch_up, padding_round
from .sampling_state import Needs
from .slots import Slots
from .work import Accepted, CatchUp, LoadSlot, Recompute, Round, RoundWork, Scores, Tokens, catch_up_sizes

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


class DeviceExecutor:
    """Runs rounds of one engine, with its drafter if it has one. One thread. An `Executor`."""

    def __init__(self, engine: Engine, num_slots: int, buckets: Sequence[int] = ()) -> None:
        """`buckets`: batch sizes whose inputs are static."""
        self.engine = engine
        self.drafter = engine.drafter
        self.shape = DraftShape(0) if self.drafter is None else self.drafter.shape
        self.num_slots = num_slots
        self.slots = Slots(num_slots, engine.model_config.vocab_size, self.drafter, engine.device)
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
        )
        self._round_graphs: RoundGraphs[DraftShape, RoundResult] | None = None
        self._catch_up_graphs: RoundGraphs[int, None] | None = None
        self._used: list[InputBlock] = []  # by work since the last round
        self._under_way: deque[_UnderWay] = deque()
        self._row_buffer = MetadataBuffers(engine.schema)
        self._local_prompts = LocalPrompts(engine, self.slots)
        self._scored: _Scored | None = None  # of the last Recompute

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
    def runs_ahead(self) -> bool:
        return self.engine.device.type != "cpu"

    def warm_up(self, progress: Progress | None = None) -> None:
        """Capture, on CUDA, the graphs of all buckets for every kind of sampling, so that service captures none and
        allocates nothing. `progress` counts them. On a CPU, catch up once. Raises ConfigError if the graphs find no
        memory."""
        sizes = catch_up_sizes(self.shape) if self.keeps_missed_rows else ()
        if captures(self.engine.device):
            shapes = [self.shape.with_steps(steps) for steps in self.shape.choices]
            self._round_graphs, self._catch_up_graphs = self._capture(shapes, sizes, progress)
            self.submit(padding_round(self.num_slots, 1, self.shape.with_steps(0)))  # compiles what surrounds a graph
            self.collect()
            return
        for num_rows in sizes:
            self.submit(padding_catch_up(self.num_slots, num_rows))
        self._free_used()

    def rehearse(self) -> None:
        """Capture the largest graphs and keep none. They take as much memory as all of them, since smaller ones fit in
        theirs. Raises as `warm_up`."""
        if captures(self.engine.device):
            sizes = catch_up_sizes(self.shape) if self.keeps_missed_rows else ()
            self._capture([self.shape], sizes[-1:], of_largest=True)

    def _capture(
        self,
        shapes: Sequence[DraftShape],
        num_rows: Sequence[int],
        progress: Progress | None = None,
        *,
        of_largest: bool = False,
    ) -> tuple[RoundGraphs[DraftShape, RoundResult], RoundGraphs[int, None]]:
        """Return graphs of rounds, and of catching up on `num_rows` rows, of all buckets, or `of_largest` alone. Raises
        ConfigError if they find no memory."""
        with suppress(torch.OutOfMemoryError):
            self.slots.allocate_all()
            blocks = self.buckets.allocate_on_device()
            shared = blocks[-1:] if of_largest else blocks, self.slots.padding, torch.cuda.graph_pool_handle()
            rounds = RoundGraphs("rounds", self._round, *shared)
            catching_up = RoundGraphs("catching up", self._catch_up, *shared)
            with torch.inference_mode():
                rounds.capture(shapes, progress)
                if num_rows:
                    catching_up.capture(num_rows, progress)
            return rounds, catching_up
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
                        self._under_way.append(self._submit_round(work))
                    case CatchUp():
                        self._submit_catch_up(work)
                    case LoadSlot():
                        self._load(work)
                    case Recompute():
                        self._recompute(work)
            return
        # inputs of no bucket are used once: keep none, since the next work may have no memory either
        self._used = [block for block in self._used if block.num_seqs in self.buckets.sizes]
        raise OutOfMemory(_no_memory(work))  # here the error is gone, whose traceback holds tensors

    @property
    def is_done(self) -> bool:
        event = self._under_way[0].event
        return event is None or event.query()

    def collect(self) -> Tokens:
        """Wait for the oldest round that was not collected, and return its report."""
        done = self._under_way.popleft()
        if done.event is not None:
            done.event.synchronize()
        for inputs in done.inputs:
            self.buckets.free(inputs)
        return _report(done)

    def collect_scores(self) -> Scores:
        """Wait for the last Recompute, which had scored tokens, and return its report, once."""
        done, self._scored = self._scored, None
        assert done is not None, "the last Recompute had no scored tokens, or was collected"
        if done.event is not None:
            done.event.synchronize()
        return Scores(done.begun, time.monotonic(), done.scores.read())

    def run_round(self, block: InputBlock, shape: DraftShape, needs: Needs) -> RoundResult:
        """Run a round with filled inputs, by a graph if the block is a bucket's and there are graphs."""
        if self._round_graphs is not None and block.num_seqs in self.buckets.sizes:
            return self._round_graphs.replay(block, shape, needs)
        return self._round(block.to(self.engine.device), shape, needs)

    def read_row(self, row: bytes) -> Sampled:
        """Return the first token of a metadata row. Raises ProtocolError if a peer's row cannot be used."""
        self._row_buffer.unpack(row)
        return self._row_buffer.get_sampled(self.vocab_size)

    # --- work ---

    def _submit_round(self, work: Round) -> _UnderWay:
        block = self.buckets.fill_round(work)
        self._used.append(block)
        result = self.run_round(block, work.shape, work.needs)
        numbers = _numbers_to_host(result.numbers[: len(work.slots)])
        logprobs = result.logprobs
        if logprobs is not None:
            num_rows = len(work.slots) * (numbers.shape[1] - _COUNTS)
            logprobs = Logprobs(*(to_host(each[:num_rows]) for each in logprobs))
        used, self._used = self._used, []
        return _UnderWay(work, used, numbers, logprobs, recorded_event(self.engine.device))

    def _recompute(self, work: Recompute) -> None:
        self._scored, begun = None, time.monotonic()
        scores = self._local_prompts.compute(work)
        if scores is not None:
            self._scored = _Scored(begun, scores, recorded_event(self.engine.device))

    def _submit_catch_up(self, work: CatchUp) -> None:
        block = self.buckets.fill_catch_up(work)
        self._used.append(block)
        if self._catch_up_graphs is not None and block.num_seqs in self.buckets.sizes:
            self._catch_up_graphs.replay(block, work.num_rows, work.needs)
        else:
            self._catch_up(block.to(self.engine.device), work.num_rows, work.needs)

    def _load(self, work: LoadSlot) -> None:
        self._local_prompts.forget(work.slot)
        draft = None
        if self.drafter is not None and work.row is None:
            draft = self.drafter.allocate(1)
        elif self.drafter is not None and work.row is not None:
            self._row_buffer.unpack(work.row)
            draft = get_draft(self._row_buffer, self.drafter, work.token_ids)
        self.slots.load(work.slot, len(work.token_ids) - 1, work.token_ids[-1], work.sampling, draft)

    # --- steps on the device ---

    def _catch_up(self, block: InputBlock, num_rows: int, needs: Needs) -> None:
        assert self.drafter is not None
        catch_up(self.drafter, self.slots, block.for_catch_up, num_rows, needs)

    def _round(self, block: InputBlock, shape: DraftShape, needs: Needs) -> RoundResult:
        return run_round(self.engine, self.drafter, self.slots, block.for_round, shape, needs)

    def _free_used(self) -> None:
        """Take back the inputs of work that no round follows."""
        for block in self._used:
            self.buckets.free(block)
        self._used.clear()


def _report(done: _UnderWay) -> Tokens:
    work, num_rows = done.work, done.numbers.shape[1] - _COUNTS
    logprobs: list[TokenLogprobs | None] = [None] * (len(work.slots) * num_rows)
    if done.logprobs is not None:
        logprobs = done.logprobs.to_rows([num for num in work.num_logprobs for _ in range(num_rows)])
    rows: list[Accepted] = []
    for row, (num_accepted, num_valid, *tokens) in enumerate(done.numbers.tolist()):
        count, start = min(num_accepted + 1, num_valid), row * num_rows
        num_drafted = min(work.limits[row], num_rows - 1)
        rows.append(Accepted(tokens[:count], logprobs[start : start + count], num_accepted, num_drafted))
    return Tokens(rows)


def _numbers_to_host(numbers: Tensor) -> Tensor:
    """Return a copy of the numbers of a round, as `to_host`. Every round is collected, so its memory stays until the
    copy is done."""
    if not captures(numbers.device):
        return to_host(numbers)
    return copy_numbers_(torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda), numbers)


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
