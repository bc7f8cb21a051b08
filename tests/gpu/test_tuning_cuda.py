"""Tuning on the GPU: the choice is kept, the second start measures nothing, and tuned output is the untuned one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.startup import tune_products
from baton.engine.tuning.tuning_file import TuningFile
from baton.engine.work import BatchRow
from baton.kernels.products.linear_configs import CHOSEN, ROW_CLASSES, ProductShape

HIDDEN = 256
BODY = [(512, HIDDEN, False), (HIDDEN, HIDDEN, False), (1408, HIDDEN, True), (HIDDEN, 704, False), (512, HIDDEN, False)]


@pytest.fixture(autouse=True)
def no_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = dict(CHOSEN)
    CHOSEN.clear()
    yield
    CHOSEN.clear()
    CHOSEN.update(kept)


@pytest.fixture
def engine(checkpoint: Callable[..., Path]) -> Engine:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 704, "head_dim": 64, "num_hidden_layers": 3}
    model = checkpoint("qwen2", "bfloat16", **sizes)
    return Engine(EngineConfig(model=str(model), device="cuda", dtype="bfloat16", num_pages=64))


def logits(engine: Engine, num_rows: int) -> torch.Tensor:
    pages = [[1 + i] for i in range(num_rows)]
    with torch.inference_mode():
        return engine.forward([BatchRow([7 + i], 0, own) for i, own in enumerate(pages)]).float()


def test_the_second_start_measures_nothing_and_computes_the_same(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = {rows: logits(engine, rows) for rows in (1, 3, 8, 17, 33)}
    tune_products(engine, measures=True)
    shapes = {ProductShape(out, size, rows, gated) for out, size, gated in BODY for rows in ROW_CLASSES}
    assert set(CHOSEN) == shapes
    assert TuningFile.of(engine.device).read() == CHOSEN
    assert sum("products measured in" in record.message for record in caplog.records) == 1
    for rows, expected in before.items():
        actual = logits(engine, rows)
        assert float((actual - expected).norm() / expected.norm()) < 0.03, rows
    first = dict(CHOSEN)
    CHOSEN.clear()
    caplog.clear()
    tune_products(engine, measures=True)
    assert first == CHOSEN and not caplog.records


def test_without_measuring_the_file_alone_is_used(engine: Engine) -> None:
    tune_products(engine, measures=False)
    assert not CHOSEN and not TuningFile.of(engine.device).path.exists()
    choice = {ProductShape(512, HIDDEN, 8): None}
    TuningFile.of(engine.device).write(dict(choice))
    tune_products(engine, measures=False)
    assert choice == CHOSEN


def test_a_damaged_file_is_replaced(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    file = TuningFile.of(engine.device)
    file.path.parent.mkdir(parents=True)
    file.path.write_text("{")
    tune_products(engine, measures=True)
    assert TuningFile.of(engine.device).read() == CHOSEN and CHOSEN
    assert any("is ignored" in record.message for record in caplog.records)
