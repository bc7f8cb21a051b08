"""The executor of a node with data-parallel attention. In each step every rank does one work, each its own.

    scheduler of rank i --work--> RankQueue i --.
                                                +--> OwnWorkExecutor --> agree --> RankWorker of each rank
    scheduler of rank j --work--> RankQueue j --'

Rank 0 runs the schedulers of all ranks, one for each. A scheduler gives its work to a `RankQueue`. When all queues have
the work of a step, the executor sends it to the ranks. A rank whose scheduler asks for no work runs the same work
without rows (agreement.py).

On GPUs a round may be begun while the one before runs. A sequence may have ended in that one; then the round writes a
page that is free by now. Rank 0 lets nothing be copied into a page before its own GPU has done the rounds that it was
given (`expect` of engine/state/cuda_pool.py). That holds for pages of other ranks, too: in every forward the last
layer's operation over all ranks comes after the KV of that layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...metadata.handoff.schema.buffers import Sampled
from ..pace.joint_sizes import NO_SIZE, JointSizes
from ..pace.padding import padding_catch_up, padding_chunk, padding_round
from ..progress import Progress
from ..rounds.draft_shape import DraftShape
from ..rounds.executor import HostProposer
from ..work import Round, RoundTokens, RoundWork, Scores, WarmUp, catch_up_sizes
from .agreement import OwnWork, agree, next_works
from .ranked_engine import RankedEngine
from .work_frames import Report, decode
from .worker import RankWorker, is_awaited, message


class OwnWorkExecutor:
    """Runs one work per rank at a time, and begins a round while the one before runs. Owns the queues of the ranks.
    Every method that works raises RankLost if a rank is gone or hangs; then the node must end."""

    def __init__(self, ranked: RankedEngine, buckets: Sequence[int] = ()) -> None:
        """`buckets`: batch sizes whose inputs are static; the other ranks have the same."""
        assert ranked.ranks.rows is not None, "the ranks hold the same sequences"
        self._ranked, self._buckets = ranked, sorted(buckets)
        self.own = RankWorker(ranked.engine, ranked.num_slots, ranked.ranks.rows, buckets)
        self.queues = [RankQueue(self, rank) for rank in range(ranked.size)]
        self._under_way: deque[list[bool]] = deque()  # of each round, the ranks whose schedulers asked for it

    def run(self, works: Sequence[OwnWork | None]) -> list[Report | None]:
        """Do works[i] on rank i, all of one kind. None: the rank is idle. Return the report of each rank; None: the
        work has none. No round may be under way."""
        assert not self._under_way, "a round that is under way reports first"
        if any(isinstance(work, Round) for work in works):
            self.begin(works)
            return list(self._finish())
        reports = [self.do(works)]
        for rank in range(1, self._ranked.size):
            frame = self._ranked.processes.report(rank) if any(map(is_awaited, works)) else b""
            reports.append(decode(frame) if frame else None)
        return reports

    def begin(self, works: Sequence[OwnWork | None]) -> None:
        """Begin a round of all ranks. `collect` gives its reports to the queues."""
        self.do(works)
        self._under_way.append([work is not None for work in works])

    @property
    def is_done(self) -> bool:
        """Whether rank 0 has done its part of the oldest round under way, if there is one."""
        return not self._under_way or self.own.executor.is_done

    def collect(self) -> None:
        """Wait for the oldest round under way, and give its reports to the queues that asked for it."""
        asked = self._under_way[0]
        for queue, has_asked, report in zip(self.queues, asked, self._finish(), strict=True):
            if has_asked:  # an idle rank reports too, but nobody there asked
                queue.take(report)

    def do(self, works: Sequence[OwnWork | None]) -> Report | None:
        """Send the works, all of one kind, to the ranks, and do that of rank 0. Return its report. The other ranks'
        reports of awaited works are to be read."""
        assert len(works) == self._ranked.size, (len(works), self._ranked.size)
        agreed = agree(works, self._buckets, self._ranked.engine.prompt_sizes)
        for rank, work in enumerate(agreed.works):
            if rank and work is not None:
                self._ranked.processes.send(rank, message(agreed.lens, work))
        own = agreed.works[0]
        if own is None:
            return None
        with self._ranked.processes.guarded():
            return self.own.do(agreed.lens, own)

    def _finish(self) -> list[RoundTokens]:
        """Wait for the oldest round under way. Return the report of each rank."""
        self._under_way.popleft()
        with self._ranked.processes.guarded():
            reports = [self.own.collect()]
        for rank in range(1, self._ranked.size):
            report: Report = decode(self._ranked.processes.report(rank))
            assert isinstance(report, RoundTokens), report
            reports.append(report)
        return reports

    def warm_up(self, progress: Progress | None = None, *, expects_prompts: bool = False) -> None:
        """Capture the graphs of all ranks, as `Executor.warm_up`. Then run each kind of work of a decode node on
        padding, on all ranks at once, so that no request waits for kernels to compile."""
        self.capture(WarmUp(expects_prompts), progress)
        num_slots, shape = self._ranked.num_slots, self.own.executor.shape
        page_size = self._ranked.engine.pool.page_size
        works: list[OwnWork] = [padding_chunk(page_size, page_size)]
        if self.own.executor.keeps_missed_rows:
            works += [padding_catch_up(num_slots, num_rows) for num_rows in catch_up_sizes(shape)]
        works += [padding_round(num_slots, 1, shape.with_steps(steps)) for steps in {0, shape.num_steps}]
        for work in works:
            self.run([work] * self._ranked.size)

    def capture(self, work: WarmUp, progress: Progress | None = None) -> None:
        """Let all ranks capture their graphs at once. `progress` counts those of rank 0."""
        for rank in range(1, self._ranked.size):
            self._ranked.processes.send(rank, message((), work))
        with self._ranked.processes.guarded():
            self.own.warm_up(work, progress)
        for rank in range(1, self._ranked.size):
            self._ranked.processes.report(rank)

    def flush(self) -> None:
        """Do all works that wait in the queues, and begin all rounds. Rounds are collected before work that reports."""
        while any(queue.works for queue in self.queues):
            works = next_works([queue.works for queue in self.queues])
            if any(isinstance(work, Round) for work in works):
                self.begin(works)
            elif any(map(is_awaited, works)):
                while self._under_way:
                    self.collect()
                for queue, work, report in zip(self.queues, works, self.run(works), strict=True):
                    if work is not None:
                        queue.take(report)
            else:
                self.do(works)


class RankQueue:
    """The `Executor` of one rank's scheduler. Works wait here; `flush` and `collect` of any rank do those of all."""

    def __init__(self, executor: OwnWorkExecutor, rank: int) -> None:
        self.works: deque[RoundWork] = deque()
        self._executor, self._device = executor, executor.own.executor  # ranks are alike, so rank 0 speaks for all
        self._tokens: deque[RoundTokens] = deque()
        self._scores: Scores | None = None
        proposer = self._device.proposer
        self.proposer = None if proposer is None else RankProposer(proposer, rank * self.num_slots)

    @property
    def num_slots(self) -> int:
        return self._device.num_slots

    @property
    def shape(self) -> DraftShape:
        return self._device.shape

    @property
    def keeps_missed_rows(self) -> bool:
        return self._device.keeps_missed_rows

    @property
    def num_prompt_states(self) -> int:
        return self._device.num_prompt_states

    @property
    def vocab_size(self) -> int:
        return self._device.vocab_size

    @property
    def context_len(self) -> int:
        return self._device.context_len

    @property
    def window(self) -> int | None:
        return self._device.window

    @property
    def runs_ahead(self) -> bool:
        return self._device.runs_ahead

    @property
    def joint_sizes(self) -> JointSizes:
        """None: a chunk is never computed beside a round."""
        return NO_SIZE

    def warm_up(self, progress: Progress | None = None, *, expects_prompts: bool = False) -> None:
        """Warm up all ranks. Call it for one of them."""
        self._executor.warm_up(progress, expects_prompts=expects_prompts)

    def submit(self, work: RoundWork) -> None:
        """Add a work. A work that a rank has no memory for raises RankLost when it is done."""
        self.works.append(work)

    @property
    def is_done(self) -> bool:
        return bool(self._tokens) or self._executor.is_done

    @property
    def num_chunks_ahead(self) -> int:
        """0: they are awaited."""
        return 0

    def flush(self) -> None:
        """Do the works of all ranks that wait."""
        self._executor.flush()

    def collect(self) -> RoundTokens:
        """Do the works of all ranks that wait, and return the report of the oldest round that was not collected."""
        self.flush()
        while not self._tokens:
            self._executor.collect()
        return self._tokens.popleft()

    def collect_scores(self) -> Scores:
        """Likewise, of the last Recompute."""
        self.flush()
        scores, self._scores = self._scores, None
        assert scores is not None, "the last Recompute had no scored tokens, or was collected"
        return scores

    def read_row(self, row: bytes) -> Sampled:
        return self._device.read_row(row)

    def expect(self, grammar: str | None) -> None:
        """Prepare for a request with this grammar, without waiting; None: it has none."""
        self._device.expect(grammar)

    def take(self, report: Report | None) -> None:
        """Keep a report of this rank until the scheduler collects it."""
        if isinstance(report, Scores):
            self._scores = report
        elif isinstance(report, RoundTokens):
            self._tokens.append(report)


class RankProposer:
    """The part of a `HostProposer` that one rank uses. Slots of unlike ranks are different texts, and all ranks share
    the texts of finished requests."""

    def __init__(self, proposer: HostProposer, first: int) -> None:
        """`first`: the number that the rank's slot 0 has among the slots of all ranks."""
        self._proposer, self._first = proposer, first

    def lookup(self, slot: int, token_ids: Sequence[int], salt: str, num_steps: int) -> list[int]:
        return self._proposer.lookup(self._first + slot, token_ids, salt, num_steps)

    def replay(self, slot: int, token_ids: Sequence[int], salt: str, num_steps: int, num_tries: int) -> tuple[int, int]:
        return self._proposer.replay(self._first + slot, token_ids, salt, num_steps, num_tries)

    def forget(self, slot: int, token_ids: Sequence[int], salt: str) -> None:
        self._proposer.forget(self._first + slot, token_ids, salt)
