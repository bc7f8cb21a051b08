"""Times of padding: measured before requests come, and without a trace in sequences, prompts and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from node_pair import params
from solo import Solo

from baton.decode_node.chunk_length import ChunkBudget
from baton.decode_node.round_clock import RoundSeconds
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.pace import padding
from baton.engine.pace.mixed_sizes import EVERY_SIZE
from baton.engine.pace.padding import measure_chunk, measure_costs, measure_mixed, measure_prompt, measure_round
from baton.engine.prompts.prompts import Prompts
from baton.engine.rounds.batch import Computed
from baton.engine.work import BatchRow


@pytest.mark.parametrize("name", ["ngram", "standalone", "eagle3", "mtp3-deepseek"])
def test_a_measured_chunk_changes_no_sequence(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = target_of(name, checkpoint)
    solo = Solo(model, num_slots=3, num_pages=60, buckets=(2,), **settings(name, model, tmp_path))
    sequence, alone = (solo.start([1, 2, 3, 4, 5], params(30, temperature=1.0, seed=2)) for _ in range(2))
    expected = solo.run(alone, 12, 2)
    solo.run(sequence, 5, 2)
    kv = solo.target_kv(sequence)
    page_size = solo.engine.pool.page_size
    for num_tokens in (1, page_size, 3 * page_size + 1):
        assert 0 < measure_chunk(solo.executor, num_tokens, page_size) < 60
        assert 0 < measure_mixed(solo.executor, 2, num_tokens, page_size) < 60
    assert torch.equal(solo.target_kv(sequence), kv)
    assert solo.run(sequence, 12, 2) == expected


def test_no_chunk_takes_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds were disturbed, and those with a chunk were not. A router takes no times below zero."""
    monkeypatch.setattr(padding, "measure_round", lambda *_: 2.0)
    monkeypatch.setattr(padding, "measure_chunk", lambda *_: 1.0)
    executor: Any = SimpleNamespace(num_slots=4, mixed_sizes=EVERY_SIZE)
    costs = measure_costs(executor, 64, 4)
    assert 0 < costs.seconds(64, 0, is_mixed=False) < 1e-3
    budget = ChunkBudget(costs, RoundSeconds(0.01), 64, None)
    for num_streams in (0, 1):
        assert budget.rate(num_streams, 0).token_s > 0


@pytest.mark.parametrize("name", ["ngram", "standalone", "eagle3", "frozen-kv-mtp"])
def test_a_measured_round_changes_no_sequence(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = target_of(name, checkpoint)
    solo = Solo(model, num_slots=3, num_pages=60, buckets=(2,), **settings(name, model, tmp_path))
    sequence, alone = (solo.start([1, 2, 3, 4, 5], params(30, temperature=1.0, seed=2)) for _ in range(2))
    expected = solo.run(alone, 12, 2)
    solo.run(sequence, 5, 2)
    before, kv = solo.draft(sequence), solo.target_kv(sequence)
    for num_seqs, num_steps in ((1, 0), (3, 2), (2, solo.rounds.shape.num_steps)):
        assert 0 < measure_round(solo.executor, num_seqs, num_steps) < 60
    assert torch.equal(solo.target_kv(sequence), kv)
    for (_, ours), (_, theirs) in zip(solo.draft(sequence).present(), before.present(), strict=True):
        assert torch.equal(ours, theirs)
    assert solo.run(sequence, 12, 2) == expected
    assert solo.rounds.stats.num_verified > 0 and not solo.executor.slots._ints[3:, 3].equal(torch.zeros(4))


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
