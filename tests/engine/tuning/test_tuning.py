"""Measuring: the cheapest kernel of every shape is chosen, what does not fit or is wrong never is. Kernels run in the
interpreter, and times are those of a price list, so that the right choice is known."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.ranks.group import OneRank
from baton.engine.ranks.ranks import ONE_RANK, Ranks
from baton.engine.startup import tune_products
from baton.engine.tuning import product_chains, tuning
from baton.engine.tuning.product_chains import Use, find_chains
from baton.engine.tuning.tuning import LEAST_GAIN, measure, share_choices
from baton.engine.tuning.tuning_file import TuningFile, decode, encode
from baton.kernels.operations import preferring
from baton.kernels.products.linear_configs import CHOSEN, Config, DoesNotFitError, ProductShape, choose, default

CHEAP, DEAR = Config("dot", 16, 64), Config("dot", 32, 64)
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"intermediate_size": 48, "vocab_size": 96}  # five products of unlike shapes
LATER = time.monotonic() + 3600


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    kept = dict(CHOSEN)
    CHOSEN.clear()
    with preferring("triton"), torch.inference_mode():
        yield
    CHOSEN.clear()
    CHOSEN.update(kept)


@pytest.fixture
def engine(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A small model, with three candidates for each product of a few rows."""
    monkeypatch.setattr(tuning, "candidates", lambda shape, num_sms: [default(shape), None, DEAR, CHEAP])
    monkeypatch.setattr(tuning, "_ORDER", (8, 4))
    monkeypatch.setattr(product_chains, "MAX_COPIES", 1)
    model = checkpoint("llama", **SMALL)
    return Engine(EngineConfig(model=str(model), device="cpu", dtype="float16", num_pages=20))


def priced(prices: Callable[[ProductShape, Config | None], float], shapes: set[ProductShape]) -> tuning.Timer:
    """Return a timer that adds up the prices of what is chosen for `shapes` while it captures."""

    def timer(run: Callable[[], object]) -> Callable[[], float]:
        run()
        cost = sum(prices(shape, choose(shape)) for shape in shapes)
        return lambda: cost

    return timer


def shapes_of(engine: Engine, num_rows: int) -> set[ProductShape]:
    return {use.shape(num_rows) for chain in find_chains(engine.model) for use in chain.uses}


def test_the_cheapest_is_chosen_shape_by_shape(engine: Engine) -> None:
    shapes, seen = shapes_of(engine, 8) | shapes_of(engine, 4), []
    best = {shape: (CHEAP, None, default(shape))[i % 3] for i, shape in enumerate(sorted(shapes))}
    timer = priced(lambda shape, config: 1.0 if config == best[shape] else 2.0, shapes)
    measure(find_chains(engine.model), None, timer, 4, lambda done, total: seen.append((done, total)), LATER)
    assert {shape: config for shape, config in CHOSEN.items() if shape in shapes} == best
    assert [done for done, _ in seen] == list(range(1, 11)), seen  # five shapes of a model, for two numbers of rows


def test_a_default_is_kept_unless_another_is_clearly_faster(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_ORDER", (8,))
    shapes = shapes_of(engine, 8)
    timer = priced(lambda shape, config: 1.0 if config == default(shape) else 1.0 - LEAST_GAIN / 2, shapes)
    measure(find_chains(engine.model), None, timer, 4, None, LATER)
    assert all(CHOSEN[shape] == default(shape) for shape in shapes)


def test_what_was_chosen_before_is_not_measured_again(engine: Engine) -> None:
    chains = find_chains(engine.model)
    CHOSEN.update(dict.fromkeys(shapes_of(engine, 8) | shapes_of(engine, 4), DEAR))

    def timer(run: Callable[[], object]) -> Callable[[], float]:
        raise AssertionError("nothing is left to measure")

    measure(chains, None, timer, 4, None, LATER)
    assert set(CHOSEN.values()) == {DEAR}


def test_after_the_deadline_nothing_is_begun(engine: Engine) -> None:
    def timer(run: Callable[[], object]) -> Callable[[], float]:
        raise AssertionError("too late")

    measure(find_chains(engine.model), None, timer, 4, None, time.monotonic() - 1)
    assert not CHOSEN


@pytest.mark.parametrize("fault", ["does not fit", "wrong"])
def test_a_kernel_that_cannot_be_used_is_never_chosen(
    fault: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Use.run

    def run(self: Use, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        result = plain(self, x, norm)
        if choose(self.shape(len(x))) != CHEAP:
            return result
        if fault == "wrong":
            return result * 1.05
        raise DoesNotFitError("shared memory")

    monkeypatch.setattr(Use, "run", run)
    monkeypatch.setattr(tuning, "_ORDER", (8,))
    shapes = shapes_of(engine, 8)
    timer = priced(lambda _, config: 1.0 if config == CHEAP else 3.0 if config == DEAR else 2.0, shapes)
    measure(find_chains(engine.model), None, timer, 4, None, LATER)
    assert CHEAP not in CHOSEN.values() and CHOSEN
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ("its result differs from torch's by 0.050" in warnings[0]) if fault == "wrong" else not warnings


def test_kernels_are_launched_by_one_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """First launches in several threads may swap their launchers."""
    plain, threads = Use.run, set[int]()

    def run(self: Use, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        return plain(self, x, norm)

    monkeypatch.setattr(Use, "run", run)
    monkeypatch.setattr(tuning, "_ORDER", (8,))
    measure(find_chains(engine.model), None, priced(lambda *_: 1.0, set()), 4, None, LATER)
    assert threads == {threading.get_ident()}


def test_a_cpu_measures_nothing(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), device="cpu", num_pages=20))
    with preferring("reference"):
        tune_products(engine, measures=True)
    assert not CHOSEN and not list(tmp_path.iterdir())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningFile:
    """The file of the device, which looks like a GPU of 4 multiprocessors."""
    file = TuningFile("Some GPU", "versions", tmp_path / "cache", tmp_path / "lock")
    monkeypatch.setattr(TuningFile, "of", lambda device: file)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(tuning, "GraphTimer", lambda: priced(lambda _, config: float(config != CHEAP), set(CHOSEN)))
    monkeypatch.setattr(tuning, "ROW_CLASSES", (4, 8))
    return file


def no_attention(num_rows: int) -> Any:
    return None


def test_choices_are_kept_and_the_next_start_measures_nothing(
    engine: Engine, file: TuningFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = {ProductShape(96, 64, 8): None}
    assert file.write(dict(other))  # of another model
    tuning.tune(engine.model, None, no_attention)
    shapes = shapes_of(engine, 8) | shapes_of(engine, 4)
    assert set(CHOSEN) == shapes | set(other) and file.read() == CHOSEN
    assert f"{len(shapes)} products measured" in caplog.records[-1].message
    first = dict(CHOSEN)
    CHOSEN.clear()
    monkeypatch.setattr(tuning, "measure", None)
    tuning.tune(engine.model, None, no_attention)
    assert first == CHOSEN


def test_what_another_node_measured_meanwhile_is_not_measured_again(
    engine: Engine, file: TuningFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = dict.fromkeys(shapes_of(engine, 8) | shapes_of(engine, 4), DEAR)
    monkeypatch.setattr(tuning, "measure", None)
    with file.alone():
        thread = threading.Thread(target=tuning.tune, args=(engine.model, None, no_attention))
        thread.start()
        time.sleep(0.3)
        assert not CHOSEN
        file.write(dict(theirs))
    thread.join()
    assert theirs == CHOSEN


def test_too_little_memory_leaves_defaults(
    engine: Engine, file: TuningFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tuning, "measure", measure)
    tuning.tune(engine.model, None, no_attention)
    assert not CHOSEN and "keep their defaults: CUDA out of memory" in caplog.records[0].message


def test_all_ranks_take_the_choices_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they have measured themselves: the output matrix must have the same bits on all ranks."""
    ours, theirs = ProductShape.of(4, 64, 32, is_gated=False), ProductShape.of(8, 64, 32, is_gated=False)
    said = encode({theirs: CHEAP})

    class Second(Ranks):
        def tell(self, data: bytes) -> bytes:
            assert decode(data) == {ours: DEAR}
            return said

    class Two(OneRank):
        rank, size = 1, 2

    monkeypatch.setitem(CHOSEN, ours, DEAR)
    share_choices(Second(Two()))
    assert dict(CHOSEN) == {theirs: CHEAP}
    share_choices(ONE_RANK)
    assert dict(CHOSEN) == {theirs: CHEAP}
    CHOSEN.clear()
