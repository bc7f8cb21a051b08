"""Chunks of padding take time and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from node_pair import params
from solo import Solo

from baton.decode_node.chunk_budget import ChunkBudget
from baton.decode_node.round_clock import RoundSeconds
from baton.engine.pace import chunk_timing
from baton.engine.pace.chunk_timing import measure_chunk, measure_costs, measure_joint
from baton.engine.pace.joint_sizes import EVERY_SIZE


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
        assert 0 < measure_joint(solo.executor, 2, num_tokens, page_size) < 60
    assert torch.equal(solo.target_kv(sequence), kv)
    assert solo.run(sequence, 12, 2) == expected


def test_no_chunk_takes_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds were disturbed, and those with a chunk were not. A router takes no times below zero."""
    monkeypatch.setattr(chunk_timing, "measure_round", lambda *_: 2.0)
    monkeypatch.setattr(chunk_timing, "measure_chunk", lambda *_: 1.0)
    executor: Any = SimpleNamespace(num_slots=4, joint_sizes=EVERY_SIZE)
    costs = measure_costs(executor, 64, 4)
    assert 0 < costs.seconds(64, 0, is_joint=False) < 1e-3
    budget = ChunkBudget(costs, RoundSeconds(0.01), 64, None)
    for num_streams in (0, 1):
        assert budget.rate(num_streams, 0).token_s > 0
