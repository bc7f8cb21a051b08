"""Executors of a node with several ranks: rank 0 sends the same work to the other ranks and does it on its own device.

    scheduler --work--> RankExecutor --work--> DeviceExecutor of rank 0
                             |
                             +--frame--> rank i: DeviceExecutor

Rank 0 decides everything. The other ranks do what they get, in the same order, and report nothing: every rank computes
the same logits and samples the same tokens. If ranks have sequences of their own (`ranks.rows`), `OwnWorkExecutor`
sends each rank its own block of the work and collects the tokens of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..metadata.handoff.buffers import Sampled
from .device_executor import DeviceExecutor
from .draft_shape import DraftShape
from .executor import HostProposer
from .joint_sizes import JointSizes
from .progress import Progress
from .prompts import Prompts, SubmittedChunk
from .ranked_engine import RankedEngine, frame_of
from .work import CatchUp, Chunk, Forget, LoadSlot, Recompute, Round, RoundTokens, RoundWork, Scores, WarmUp
from .work_frames import decode


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
    def joint_sizes(self) -> JointSizes:
        return self._own.joint_sizes

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

    @property
    def num_chunks_ahead(self) -> int:
        return self._own.num_chunks_ahead

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

    @property
    def context_len(self) -> int:
        return self._own.context_len

    @property
    def vocab_size(self) -> int:
        return self._own.vocab_size

    @property
    def longest_chunk(self) -> tuple[int, float] | None:
        return self._own.longest_chunk

    @property
    def runs_ahead(self) -> bool:
        return self._own.runs_ahead

    @property
    def keys(self) -> frozenset[int]:
        return self._own.keys

    def warm_up(self, progress: Progress | None = None) -> None:
        """Do nothing: chunks have no graphs on a CPU."""

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


class OwnWorkExecutor:
    """Runs one work per rank at a time, for ranks that hold sequences of their own (`divides_sequences`)."""

    def __init__(self, ranked: RankedEngine) -> None:
        assert ranked.ranks.rows is not None, "the ranks hold the same sequences"
        self._ranked, self._rows = ranked, ranked.ranks.rows
        self.own = DeviceExecutor(ranked.engine, ranked.num_slots)

    def run(self, works: Sequence[LoadSlot | None] | Sequence[Recompute] | Sequence[Round]) -> list[RoundTokens]:
        """Do works[i] on rank i. Return the tokens of each rank if the works are rounds, else nothing.

        A forward is collective: an idle rank gets a Recompute without rows or a Round without slots, of the same shape
        as the others'. A Round has no chunk beside it. Raises RankLost if a rank is gone or hangs."""
        assert len(works) == self._ranked.size, (len(works), self._ranked.size)
        assert not any(isinstance(work, Round) and work.beside is not None for work in works), (
            "a chunk is work of its own"
        )
        lens = tuple(map(_num_rows, works))
        for rank, work in enumerate(works):
            if rank and work is not None:
                self._ranked.processes.send(rank, frame_of(lens, work))
        tokens: list[RoundTokens] = []
        own = works[0]
        with self._ranked.processes.guarded():
            if own is not None:
                self._rows.lens = lens
                self.own.submit(own)
            if isinstance(own, Round):
                tokens.append(self.own.collect())
        if tokens:
            tokens += [decode(self._ranked.processes.report(rank)) for rank in range(1, self._ranked.size)]
        return tokens


def _num_rows(work: RoundWork | None) -> int:
    """Return the rows of the target's forward of a work."""
    match work:
        case Round():
            return len(work.slots) * (work.shape.num_drafts + 1)
        case Recompute():
            return sum(len(row.input_ids) for row in work.rows)
        case LoadSlot() | CatchUp() | None:
            return 0
