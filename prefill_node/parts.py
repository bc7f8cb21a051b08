"""The parts of a prefill node of which there are two kinds: for one pool of pages, and for a pool on each rank.

    PrefillParts.on_one     PrefillScheduler          chunk_work.submit      PrefixCache
    PrefillParts.on_ranks   RankedPrefillScheduler    ranked_chunks.submit   RankedCache

The node's loop knows the interfaces alone. A request says which rank it is on; with one pool that is rank 0.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..engine.pace.padding import measure_prompt
from ..engine.prompts.executor import OwnPromptExecutor, PromptExecutor, PromptStates
from ..engine.state.prefix_cache import PrefixCache
from ..engine.state.ranked_cache import NodeCache, RankedCache
from ..metadata.wire.node_info import RankLoad
from . import chunk_work, ranked_chunks
from .chunk_length import measured_sharing_limit
from .chunk_work import ChunkUnderWay
from .ranked_scheduler import RankedPrefillScheduler
from .request import Request
from .scheduler import PrefillScheduler, StepPlan

logger = logging.getLogger(__name__)


class PromptScheduler(Protocol):
    """Decides which prompts a step computes, and owns their pages (scheduler.py)."""

    @property
    def waiting(self) -> Collection[Request]: ...

    @property
    def computing(self) -> Collection[Request]: ...

    @property
    def handing_over(self) -> Collection[Request]: ...

    @property
    def num_queued_tokens(self) -> int: ...

    @property
    def rank_loads(self) -> tuple[RankLoad, ...]:
        """The load of each rank; empty: there is one pool."""
        ...

    def submit(self, request: Request) -> None: ...

    def start(self) -> list[Request]: ...

    def plan(self) -> StepPlan: ...

    def hand_over(self, request: Request) -> None: ...

    def stop(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None: ...

    def find(self, rid: str, attempt: int) -> list[Request]: ...

    def num_pages(self, request: Request) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillParts:
    """Collaborators of one prefill node."""

    prompts: PromptStates
    cache: NodeCache
    scheduler: PromptScheduler
    submit: Callable[[StepPlan], ChunkUnderWay]  # raises OutOfMemory
    prepare: Callable[[], None] = lambda: None  # called when the graphs are there, before prompts come

    @classmethod
    def on_one(
        cls, prompts: PromptExecutor, cache: PrefixCache, max_running: int, chunk: int, *, has_tails: bool = True
    ) -> PrefillParts:
        """Return the parts of a node with one pool. `cache` owns its pages, which `prompts` writes. `has_tails`: long
        prompts are divided (chunk_length.py)."""
        scheduler = PrefillScheduler(cache, max_running, chunk, has_tails=has_tails)
        return cls(
            prompts=prompts,
            cache=cache,
            scheduler=scheduler,
            submit=functools.partial(chunk_work.submit, prompts),
            prepare=functools.partial(_limit_sharing, scheduler, prompts),
        )

    @classmethod
    def on_ranks(
        cls, prompts: OwnPromptExecutor, caches: Sequence[PrefixCache], max_running: int, chunk: int
    ) -> PrefillParts:
        """Return the parts of a node whose ranks have prompts of their own. caches[i] owns the pages of rank i. Each
        rank computes at most `max_running` prompts at once and `chunk` tokens per step."""
        return cls(
            prompts=prompts,
            cache=RankedCache(caches),
            scheduler=RankedPrefillScheduler([PrefillScheduler(cache, max_running, chunk) for cache in caches]),
            submit=functools.partial(ranked_chunks.submit, prompts, len(caches)),
        )


def _limit_sharing(scheduler: PrefillScheduler, prompts: PromptExecutor) -> None:
    """Measure up to which size of a chunk prompts gain by sharing it. Ranks that have prompts of their own have no
    limit: a step takes as long as the longest chunk, so a rank with short prompts would wait for the others."""
    chunk_s = functools.partial(measure_prompt, prompts, scheduler.page_size)
    limit = measured_sharing_limit(chunk_s, min(scheduler.chunk_tokens, prompts.context_len))
    scheduler.share_up_to(limit)
    if limit is not None:
        logger.info("prompts share chunks of up to %d tokens", limit)
