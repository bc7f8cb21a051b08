"""Prompts of ranks that have sequences of their own: one chunk per rank, and nothing is kept of a forgotten one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drafters import settings
from thread_ranks import ThreadRanks

from baton.engine.config import EngineConfig
from baton.engine.ranks.own_work_prompts import OwnWorkPrompts
from baton.engine.work import BatchRow, Chunk, ChunkRow

IDS = [7, 8, 9, 7, 8, 3]


def test_each_rank_computes_its_chunk_and_forgets_its_prompt(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The drafter needs states of the prompt's last positions, which a rank keeps until it is told."""
    model = checkpoint("llama")
    drafter = settings("mtp3-deepseek", model, tmp_path, steps=3)
    config = EngineConfig(model=str(model), device="cpu", threads=1, page_size=4, num_pages=16, **drafter)
    with ThreadRanks(2, config) as ranks:
        prompts = OwnWorkPrompts(ranks.executor)
        chunk = Chunk([ChunkRow(5, IDS, BatchRow(IDS[:4], 0, [1, 2], 1, 4), 1)], [])
        idle, scored = prompts.run([None, chunk])
        assert not idle.scores.logprobs and len(scored.scores.logprobs[0]) == 4
        assert prompts.keys == {5} and ranks.workers[1]._prompts.keys == {5} and not ranks.workers[0]._prompts.keys
        prompts.forget(5)
        ranks.settle()
        assert not prompts.keys and not ranks.workers[1]._prompts.keys
        assert (prompts.vocab_size, prompts.context_len) == (ranks.executor.queues[0].vocab_size, 60)
        assert not prompts.runs_ahead and prompts.longest_chunk is None
        num_operations = len(ranks.group.traces[0])
        prompts.warm_up()
        assert len(ranks.group.traces[0]) == num_operations
