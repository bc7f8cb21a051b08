"""Rounds of padding take time and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafters import settings, target_of
from node_pair import params
from solo import Solo

from baton.engine.pace.round_timing import measure_round


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
