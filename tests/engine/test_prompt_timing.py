"""Chunks of padding take time on a prefill node, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafters import settings, target_of
from thread_ranks import ThreadRanks

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.own_work_prompts import OwnWorkPrompts
from baton.engine.prompt_timing import measure_own_prompts, measure_prompt
from baton.engine.prompts import Prompts


@pytest.mark.parametrize("name", ["ngram", "eagle3", "mtp3-deepseek"])
def test_a_measured_chunk_writes_no_page_and_keeps_no_state(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    drafter = settings(name, model, tmp_path)
    engine = Engine(EngineConfig(model=str(model), device="cpu", threads=1, page_size=4, num_pages=16, **drafter))
    prompts, before = Prompts(engine), engine.kv.clone()
    for num_tokens in (1, 4, 13):
        assert 0 < measure_prompt(prompts, 4, num_tokens) < 60
    assert not prompts.keys
    assert torch.equal(engine.kv[:, 1:], before[:, 1:]), "padding has page 0"
    assert engine.pool.num_free == engine.pool.num_usable


def test_every_rank_with_prompts_of_its_own_computes_a_chunk(checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), device="cpu", threads=1, page_size=4, num_pages=16)
    with ThreadRanks(2, config, num_slots=0) as ranks:
        prompts = OwnWorkPrompts(ranks.executor)
        assert 0 < measure_own_prompts(prompts, 2, 4, 9) < 60
        assert not prompts.keys
