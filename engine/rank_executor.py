"""Executors of a node with several ranks: rank 0 sends the same work to the other ranks and does it on its own device.

    scheduler --work--> RankExecutor --work--> DeviceExecutor of rank 0
                             |
                             +--frame--> rank i: DeviceExecutor

Rank 0 decides everything. The other ranks do what they get, in the same order, and report nothing: every rank computes
the same logits and samples the same tokens. If ranks have sequences of their own (`ranks.rows`), each rank gets a work
of its own (own_work_executor.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from ..metadata.handoff.buffers import Sampled
from .config import EngineConfig
from .device_executor import DeviceExecutor
from .draft_shape import DraftShape
from .engine import Engine, use_threads
from .executor import HostProposer
from .group import TIMEOUT_S, CpuGroup
from .products.ranked import RankRows
from .progress import Progress
from .prompts import Prompts, SubmittedChunk
from .rank_processes import READY, RankProcesses
from .rank_worker import RankWorker, serve_rank
from .ranks import Ranks
from .work import Chunk, Forget, LoadSlot, Round, RoundTokens, RoundWork, Scores, WarmUp
from .work_frames import Work, decode, encode


class RankedEngine:
    """Owns rank 0's engine and the processes of the other ranks. Context manager: leaving it ends them."""

    def __init__(
        self,
        config: EngineConfig,
        size: int,
        *,
        num_slots: int,
        divides_sequences: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Start the ranks, and wait until all have loaded their share of the model.

        `divides_sequences`: every rank attends for sequences of its own. `timeout_s`: a collective operation or a
        report that takes longer raises RankLost. Raises RankLost if a rank cannot start."""
        self.size, self.num_slots = size, num_slots
        self._stack = ExitStack()
        with ExitStack() as starting:
            folder = starting.enter_context(tempfile.TemporaryDirectory(prefix="baton-ranks-"))
            meeting = str(Path(folder) / "meeting")
            self.processes = starting.enter_context(
                RankProcesses(
                    size, run_rank, size, meeting, config, num_slots, divides_sequences, timeout_s, timeout_s=timeout_s
                )
            )
            with self.processes.guarded():
                group = CpuGroup(0, size, Path(meeting), timeout_s=timeout_s)
                starting.callback(group.close)
                self.ranks = Ranks(group, RankRows() if divides_sequences else None)
                use_threads(config)
                self.engine = Engine(config, ranks=self.ranks)
            self.processes.wait_ready()
            self._stack = starting.pop_all()

    def __enter__(self) -> RankedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all other ranks and leave the group."""
        self._stack.close()

    def send(self, work: Work) -> None:
        """Send work to all other ranks."""
        frame = encode(work)
        for rank in range(1, self.size):
            self.processes.send(rank, frame)


class RankExecutor:
    """Runs rounds on all ranks, which hold the same sequences. An `Executor`. Every method that works raises RankLost
    if a rank is gone or hangs; then the node must end."""

    def __init__(self, ranked: RankedEngine) -> None:
        self._ranked = ranked
        self._own = DeviceExecutor(ranked.engine, ranked.num_slots)

    @property
    def num_slots(self) -> int:
        return self._own.num_slots

    @property
    def shape(self) -> DraftShape:
        return self._own.shape

    @property
    def keeps_missed_rows(self) -> bool:
        return self._own.keeps_missed_rows

    @property
    def num_prompt_states(self) -> int:
        return self._own.num_prompt_states

    @property
    def proposer(self) -> HostProposer | None:
        """The drafter of rank 0: proposals are part of the work."""
        return self._own.proposer

    @property
    def vocab_size(self) -> int:
        return self._own.vocab_size

    @property
    def context_len(self) -> int:
        return self._own.context_len

    @property
    def runs_ahead(self) -> bool:
        return self._own.runs_ahead

    @property
    def joint_tokens(self) -> Sequence[int]:
        return self._own.joint_tokens

    def warm_up(self, progress: Progress | None = None, *, expects_prompts: bool = False) -> None:
        self._ranked.send(WarmUp(expects_prompts))
        with self._ranked.processes.guarded():
            self._own.warm_up(progress, expects_prompts=expects_prompts)

    def submit(self, work: RoundWork) -> None:
        """Do `work` on all ranks. A rank without memory for it raises RankLost, since others may have done it. Only a
        sequence that rank 0 cannot load raises what `DeviceExecutor.submit` does: the others have not heard of it."""
        if isinstance(work, LoadSlot):  # no rank waits for another here
            self._own.submit(work)
            self._ranked.send(work)
            return
        self._ranked.send(work)
        with self._ranked.processes.guarded():
            self._own.submit(work)

    @property
    def is_done(self) -> bool:
        return self._own.is_done

    def collect(self) -> RoundTokens:
        with self._ranked.processes.guarded():
            return self._own.collect()

    def collect_scores(self) -> Scores:
        with self._ranked.processes.guarded():
            return self._own.collect_scores()

    def read_row(self, row: bytes) -> Sampled:
        return self._own.read_row(row)


class RankPrompts:
    """Computes chunks of prompts on all ranks, which hold the same sequences. Reports are rank 0's."""

    def __init__(self, ranked: RankedEngine) -> None:
        self._ranked = ranked
        self._own = Prompts(ranked.engine)

    def submit(self, chunk: Chunk) -> SubmittedChunk:
        """Do a chunk on all ranks, its drafts too. Raises RankLost."""
        self._ranked.send(chunk)
        with self._ranked.processes.guarded():
            submitted = self._own.submit(chunk)
            submitted.draft()
            return submitted

    def forget(self, key: int) -> None:
        """Free what the ranks keep of a prompt."""
        self._ranked.send(Forget(key))
        self._own.forget(key)


def run_rank(
    connection: Connection,
    rank: int,
    size: int,
    meeting: str,
    config: EngineConfig,
    num_slots: int,
    divides_sequences: bool,
    timeout_s: float,
) -> None:
    """Run rank 1 or above: load the share of the model, then do work until the pipe is closed (EOFError)."""
    group = CpuGroup(rank, size, Path(meeting), timeout_s=timeout_s)
    rows = RankRows() if divides_sequences else None
    use_threads(config)
    engine = Engine(config, ranks=Ranks(group, rows))
    if rows is not None:
        worker = RankWorker(engine, num_slots, rows)
        connection.send_bytes(READY)
        serve_rank(connection, worker)
    executor, prompts = DeviceExecutor(engine, num_slots), Prompts(engine)
    connection.send_bytes(READY)
    num_under_way = 0
    while True:
        match work := decode(connection.recv_bytes()):
            case Chunk():
                prompts.submit(work).draft()
            case Forget():
                prompts.forget(work.key)
            case WarmUp():
                executor.warm_up(expects_prompts=work.expects_prompts)
            case Round():
                executor.submit(work)
                num_under_way += 1
            case _:
                executor.submit(work)
        if num_under_way > executor.runs_ahead:  # nobody asks for the tokens, which rank 0 has too
            executor.collect()
            num_under_way -= 1
