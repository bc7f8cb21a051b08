"""The parts of a decode node of which there are two kinds: for one pool of pages, and for a pool on each rank.

    DecodeParts.on_one     DecodeScheduler          Rounds          PrefixCache
    DecodeParts.on_ranks   RankedDecodeScheduler    RankedRounds    RankedCache

The node's loop knows the interfaces alone. A sequence says which rank it is on; with one pool that is rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..engine.rounds.draft_shape import DraftShape
from ..engine.rounds.executor import Executor, WaitingExecutor
from ..engine.rounds.rounds import LocalChunk, Rounds, Submitted
from ..engine.rounds.stats import RoundStats
from ..engine.sampling.state import Needs
from ..engine.state.prefix_cache import PrefixCache
from ..engine.state.ranked_cache import NodeCache, RankedCache
from ..engine.work import BatchRow, RoundTokens, Scores
from ..metadata.wire.node_info import RankLoad
from ..metadata.wire.request import Unit
from .ranked_rounds import RankedRounds
from .ranked_scheduler import RankedDecodeScheduler
from .scheduler import Budget, Choose, DecodeScheduler, StepPlan
from .sequence import Sequence


class NodeScheduler(Protocol):
    """Decides which sequences a step runs, and owns their pages (scheduler.py)."""

    @property
    def reserved(self) -> Mapping[Unit, Sequence]: ...

    @property
    def running(self) -> Seq[Sequence]: ...

    @property
    def preempted(self) -> Seq[Sequence]: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def num_streams(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...

    @property
    def rank_loads(self) -> tuple[RankLoad, ...]:
        """The load of each rank; empty: there is one pool."""
        ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def num_releases(self) -> int: ...

    def reserve(self, sequence: Sequence) -> bool: ...

    def start_pulled(self, unit: Unit) -> Sequence: ...

    def start_local(self, unit: Unit) -> Sequence: ...

    def share_computed(self, sequence: Sequence, num_tokens: int | None = None) -> None: ...

    def plan(self, shape: DraftShape | None = None) -> StepPlan: ...

    def finish(self, sequence: Sequence) -> None: ...

    def find(self, rid: str, attempt: int, choices: tuple[int, ...] | None) -> list[Sequence]: ...

    def get(self, unit: Unit) -> Sequence | None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class NodeRounds(Protocol):
    """Makes the work of executors from sequences, and gives them its results (engine/rounds/rounds.py)."""

    @property
    def stats(self) -> RoundStats: ...

    def admit(self, sequence: Sequence, row: bytes | None) -> None: ...

    def reload(self, sequence: Sequence) -> None: ...

    def release(self, sequence: Sequence) -> None: ...

    def number(self, sequence: Sequence) -> int | None: ...

    def submit(
        self, sequences: Seq[Sequence], shape: DraftShape, limits: Seq[int], beside: LocalChunk | None = None
    ) -> Submitted: ...

    def collect(self, submitted: Submitted) -> RoundTokens: ...

    def recompute(self, sequences: Seq[Sequence], rows: Seq[BatchRow]) -> None: ...

    def collect_scores(self) -> Scores: ...

    def reads_tokens(self, shape: DraftShape) -> bool: ...

    def num_missed(self, sequences: Seq[Sequence]) -> int: ...

    def kind(self, sequences: Seq[Sequence]) -> Needs: ...

    def replay(self, sequence: Sequence, num_tries: int) -> tuple[int, int]: ...


class Policy(NamedTuple):
    """Decisions that a node makes for its scheduler. `DecodeScheduler` documents each of them."""

    choose: Choose | None
    rests: Callable[[], bool] | None
    budget: Budget
    on_finish: Callable[[Sequence], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParts:
    """Collaborators of one decode node."""

    executor: Executor  # of one rank; ranks are alike
    cache: NodeCache
    rounds: NodeRounds
    num_slots: int  # of all ranks
    make_scheduler: Callable[[Policy], NodeScheduler]

    @classmethod
    def on_one(cls, executor: Executor, cache: PrefixCache, chunk: int) -> DecodeParts:
        """Return the parts of a node with one pool. `cache` owns its pages, which `executor` writes. A step computes at
        most `chunk` prompt tokens."""

        def make_scheduler(policy: Policy) -> DecodeScheduler:
            return _scheduler(executor, cache, chunk, policy)

        return cls(
            executor=executor,
            cache=cache,
            rounds=Rounds(executor),
            num_slots=executor.num_slots,
            make_scheduler=make_scheduler,
        )

    @classmethod
    def on_ranks(cls, queues: Seq[WaitingExecutor], caches: Seq[PrefixCache], chunk: int) -> DecodeParts:
        """Return the parts of a node whose ranks have sequences of their own. caches[i] owns the pages that queues[i]
        writes. In a step each rank computes at most `chunk` prompt tokens."""

        def make_scheduler(policy: Policy) -> RankedDecodeScheduler:
            of_rank = policy._replace(choose=None, rests=None)
            ranks = [_scheduler(queue, cache, chunk, of_rank) for queue, cache in zip(queues, caches, strict=True)]
            return RankedDecodeScheduler(ranks, choose=policy.choose, rests=policy.rests)

        return cls(
            executor=queues[0],
            cache=RankedCache(caches),
            rounds=RankedRounds(queues),
            num_slots=sum(queue.num_slots for queue in queues),
            make_scheduler=make_scheduler,
        )


def _scheduler(executor: Executor, cache: PrefixCache, chunk: int, policy: Policy) -> DecodeScheduler:
    return DecodeScheduler(
        cache,
        executor.num_slots,
        chunk,
        shape=executor.shape,
        context_len=executor.context_len,
        num_prompt_states=executor.num_prompt_states,
        choose=policy.choose,
        rests=policy.rests,
        budget=policy.budget,
        joint=executor.joint_sizes,
        window=executor.window,
        on_finish=policy.on_finish,
    )
