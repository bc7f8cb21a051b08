"""Executors of a node with several ranks: rank 0 sends the same work to the other ranks and does it on its own device.

    scheduler --work--> RankExecutor --work--> DeviceExecutor of rank 0
                             |
                             +--frame--> rank i: DeviceExecutor

Rank 0 decides everything. The other ranks do what they get, in the same order, and report nothing: every rank computes
the same logits and samples the same tokens. Ranks with sequences of their own are nodes (steps.py).
"""

from __future__ import annotations

from ...metadata.handoff.schema.buffers import Sampled
from ..pace.draft_length import DraftShape
from ..pace.mixed_sizes import MixedSizes
from ..progress import Progress
from ..prompts.prompts import Prompts, SubmittedChunk
from ..rounds.device_executor import executor_of
from ..rounds.executor import HostProposer
from ..state.tail_pages import Windows
from ..work import Chunk, Forget, LoadSlot, RoundTokens, RoundWork, Scores, WarmUp
from .ranked_engine import RankedEngine


class RankExecutor:
    """Runs rounds on all ranks, which hold the same sequences. An `Executor`. Every method that works raises RankLost
    if a rank is gone or hangs; then the node must end."""

    def __init__(self, ranked: RankedEngine) -> None:
        self._ranked = ranked
        self._own = executor_of(ranked.engine, ranked.num_slots)

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
    def windows(self) -> Windows:
        return self._own.windows

    @property
    def runs_ahead(self) -> bool:
        return self._own.runs_ahead

    @property
    def group_steps(self) -> None:
        return None

    @property
    def mixed_sizes(self) -> MixedSizes:
        return self._own.mixed_sizes

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

    def expect(self, grammar: str) -> None:
        """Prepare for a request with this grammar, without waiting."""
        self._own.expect(grammar)


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
        assert not self._ranked.num_slots, "the ranks of a node that runs rounds capture the graphs of rounds"
        self._ranked.send(WarmUp(expects_prompts=True))
        with self._ranked.processes.guarded():
            self._own.warm_up(progress)

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

    def expect(self, grammar: str) -> None:
        """Prepare for a request with this grammar, without waiting."""
        self._own.expect(grammar)
