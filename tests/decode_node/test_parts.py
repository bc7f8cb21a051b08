"""The parts of a decode node, for one pool and for a pool on each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from thread_ranks import ThreadRanks

from baton.decode_node.chunk_length import ChunkRoom
from baton.decode_node.config import DecodeConfig
from baton.decode_node.parts import DecodeParts, Policy
from baton.decode_node.ranked_scheduler import RankedDecodeScheduler
from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.draft_shape import DraftShape
from baton.engine.rounds.rounds import Rounds

POLICY = Policy(lambda *_: DraftShape(0), lambda: False, lambda *_: ChunkRoom(3), lambda _: None)


def _config(checkpoint: Callable[..., Path]) -> DecodeConfig:
    return DecodeConfig(
        model=str(checkpoint("llama")), device="cpu", threads=1, page_size=4, num_pages=16, speculative="ngram"
    )


def test_one_pool_has_the_plain_parts(checkpoint: Callable[..., Path]) -> None:
    engine = Engine(_config(checkpoint))
    executor = DeviceExecutor(engine, 3)
    parts = DecodeParts.on_one(executor, engine.cache, 7)
    scheduler = parts.make_scheduler(POLICY)
    assert type(scheduler) is DecodeScheduler and type(parts.rounds) is Rounds and parts.cache is engine.cache
    assert (scheduler.max_running, scheduler.chunk_tokens, scheduler.shape) == (3, 7, executor.shape)
    assert scheduler._choose is POLICY.choose and parts.executor is executor and parts.num_slots == 3


def test_ranks_have_a_scheduler_each_and_are_asked_together(checkpoint: Callable[..., Path]) -> None:
    with ThreadRanks(2, _config(checkpoint), num_slots=3) as ranks:
        parts = DecodeParts.on_ranks(ranks.executor.queues, ranks.engine.caches, 7)
        scheduler = parts.make_scheduler(POLICY)
        assert isinstance(scheduler, RankedDecodeScheduler) and parts.num_slots == 6
        assert [rank.cache for rank in scheduler.ranks] == ranks.engine.caches
        assert [(rank.max_running, rank.chunk_tokens) for rank in scheduler.ranks] == [(3, 7)] * 2
        assert scheduler._choose is POLICY.choose and scheduler._rests is POLICY.rests
        for rank in scheduler.ranks:
            assert rank._choose is None and rank._rests is None, "one shape is chosen for all"
            assert rank._budget is POLICY.budget and rank._on_finish is POLICY.on_finish
        assert parts.cache.pool.num_pages == 32
