"""Chunks of padding take time on a prefill node, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from drafters import settings, target_of

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.pace.prompt_timing import measure_prompt
from baton.engine.prompts.prompts import Prompts
from baton.engine.rounds.batch import Computed
from baton.engine.work import BatchRow


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


def test_the_tokens_of_a_measured_chunk_differ(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal ones would choose the same experts of a mixture, and read the weights of no others."""
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), device="cpu", threads=1, page_size=4, num_pages=16))
    prompts, seen = Prompts(engine), list[int]()
    compute = engine.compute

    def record(rows: Sequence[BatchRow]) -> Computed:
        seen.extend(rows[0].input_ids)
        return compute(rows)

    monkeypatch.setattr(engine, "compute", record)
    measure_prompt(prompts, 4, 40)
    assert len(set(seen)) == 40 and max(seen) < prompts.vocab_size
