"""The parts of a prefill node, for one pool and for a pool on each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from thread_ranks import ThreadRanks

from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts
from baton.engine.ranks.own_work_prompts import OwnWorkPrompts
from baton.prefill_node.config import PrefillConfig
from baton.prefill_node.parts import PrefillParts
from baton.prefill_node.ranked_scheduler import RankedPrefillScheduler
from baton.prefill_node.scheduler import PrefillScheduler


def test_one_pool_has_the_plain_parts(engine: Engine) -> None:
    prompts = Prompts(engine)
    parts = PrefillParts.on_one(prompts, engine.cache, 3, 8)
    assert type(parts.scheduler) is PrefillScheduler and parts.cache is engine.cache and parts.prompts is prompts
    assert (parts.scheduler.max_running, parts.scheduler.chunk_tokens) == (3, 8)


def test_ranks_have_a_scheduler_each(checkpoint: Callable[..., Path]) -> None:
    config = PrefillConfig(model=str(checkpoint("llama")), device="cpu", threads=1, page_size=4, num_pages=16)
    with ThreadRanks(2, config, num_slots=0) as ranks:
        parts = PrefillParts.on_ranks(OwnWorkPrompts(ranks.executor), ranks.engine.caches, 3, 8)
        assert isinstance(parts.scheduler, RankedPrefillScheduler)
        assert [rank.cache for rank in parts.scheduler.ranks] == ranks.engine.caches
        assert [(rank.max_running, rank.chunk_tokens) for rank in parts.scheduler.ranks] == [(3, 8)] * 2
        assert (parts.cache.pool.num_pages, parts.cache.pool.num_usable) == (32, 15)
