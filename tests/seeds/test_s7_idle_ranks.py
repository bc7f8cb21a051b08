"""S7: a rank without rows runs the same functions on zero rows, of the widths that HiddenLayout says.

Alone, prefill, rounds, catching up and the end of prompts run on zero rows with every drafter. Beside a live rank, an
idle one joins every collective operation, in every phase, and the output is that of one process. Each defect is put in
once and caught. All cells run with BATON_WHOLE_MATRIX=1; otherwise each drafter and variant runs with one rank first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafters import ALL, settings, target_of
from idle_ranks import Cell, Worlds, cells
from solo import Solo

from baton.engine.sampling_batch import SamplingBatch
from baton.engine.sampling_state import Needs
from baton.engine.work import CatchUp, Recompute, Round, RoundTokens

TREES = ("eagle", "eagle3", "mtp-deepseek", "mtp-mimo", "frozen-kv-mtp", "hyper-eagle", "hyper-mtp")
EVERYTHING = Needs(True, True, True, True, True, True, 2)


@pytest.mark.parametrize(("name", "topk"), [*((name, 1) for name in ("ngram", *ALL)), *((name, 2) for name in TREES)])
def test_a_rank_without_rows_runs_everything(
    name: str, topk: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    tree = {"draft_topk": topk, "draft_tokens": 4} if topk > 1 else {}
    solo = Solo(model, num_pages=60, **settings(name, model, tmp_path, steps=3), **tree)
    kvs = [kv.clone() for kv in solo.engine._kvs]
    executor, shape = solo.executor, solo.rounds.shape
    executor.slots.allocate_all()
    for num_steps in (0, shape.num_steps):
        for needs in (Needs(), EVERYTHING):
            executor.submit(Round([], [], [], [], [], shape.with_steps(num_steps), needs, []))
            assert executor.collect() == RoundTokens([])
    if executor.keeps_missed_rows:
        for num_rows in (1, shape.num_steps + 1):
            executor.submit(CatchUp([], [], [], [], [], num_rows, Needs()))
    executor.submit(Recompute([], []))
    assert all(torch.equal(kv, before) for kv, before in zip(solo.engine._kvs, kvs, strict=True))


@pytest.mark.parametrize("name", ["ngram", *ALL])
def test_the_draft_state_of_no_prompts_has_the_widths_of_the_layout(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    solo = Solo(model, num_pages=60, **settings(name, model, tmp_path, steps=3))
    engine = solo.engine
    computed = engine.compute([])
    assert computed.logits.shape == (0, engine.model_config.vocab_size)
    width = engine.speculation.hidden.allocate("extend", 0, engine.device)
    assert (computed.extend is None) == (width is None)
    assert computed.extend is None or width is None or computed.extend.shape == width.shape
    tokens = torch.zeros(0, dtype=torch.int64)
    with torch.inference_mode():
        draft = solo.drafter.finish_prompt([], tokens, computed.extend, SamplingBatch.of([], engine.device))
    found, wanted = (
        [(key, each.shape, each.dtype) for key, each in state.present()] for state in (draft, solo.drafter.allocate(0))
    )
    assert found == wanted


# --- an idle rank beside a live one ---

IS_WHOLE = "BATON_WHOLE_MATRIX" in os.environ
CELLS = [cell for number, cell in enumerate(cells()) if IS_WHOLE or number % 4 in (0, 3)]


@pytest.fixture(scope="module")
def worlds(checkpoint: Callable[..., Path]) -> Worlds:
    return Worlds(checkpoint)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_an_idle_rank_joins_every_phase_of_a_live_one(
    cell: Cell, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worlds.of(cell, tmp_path, monkeypatch) as world:
        world.live(cell.first)
