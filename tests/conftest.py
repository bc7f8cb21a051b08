"""Fixtures for every folder of tests."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
import triton_device  # before triton is imported, by transformers for one
from checkpoints import make_checkpoint
from thinned import is_whole, pairs

CheckpointFactory = Callable[..., Path]

# Results do not depend on the number of cores then. Threads of many tests at once would wait for each other.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; processes started here inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if is_whole():
        return
    _thin(items)
    for item in items:
        if item.get_closest_marker("whole"):
            item.add_marker(pytest.mark.skip(reason="takes long; runs with BATON_WHOLE_MATRIX=1"))


def _thin(items: list[pytest.Item]) -> None:
    """Mark cells of matrices with three axes or more as `whole`, but for those that `pairs` chooses: every two values
    meet. Every value occurs if a test is marked `each_value`."""
    matrices: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("whole"):
            matrices.setdefault((str(item.path), item.originalname), []).append(item)
    for cells in matrices.values():
        axes = _axes(cells[0])
        is_sparse = cells[0].get_closest_marker("each_value") is not None
        if len(axes) > 2 or is_sparse:
            kept = pairs(
                [tuple(tuple(id(each.callspec.params[name]) for name in axis) for axis in axes) for each in cells],
                1 if is_sparse else 2,
            )
            for i in set(range(len(cells))) - kept:
                cells[i].add_marker(pytest.mark.whole)


def _axes(item: pytest.Function) -> list[list[str]]:
    """Return the parameters of each list of values: of each `parametrize`, and of each fixture that has some."""
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    axes = [mark.replace(" ", "").split(",") if isinstance(mark, str) else list(mark) for mark in marks]
    return axes + [[name] for name in item.callspec.params if not any(name in axis for axis in axes)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep Python's garbage collector from the modules and tests: they stay, and it would look at them again and again
    while they are made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    _let_loggers_propagate()
    if triton_device.IS_INTERPRETED and "triton" in sys.modules:
        triton_device.quicken_interpreter()


def _let_loggers_propagate() -> None:
    """Let the loggers of libraries pass their records on. pytest adds two handlers to each logger that does not, three
    times per test, and torch has forty of them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in ("torch", "transformers"):
            logger.propagate = True


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """`checkpoint("llama", num_hidden_layers=2, ...)` -> directory of a small random checkpoint, written once.

    It is made as by `make_checkpoint`, but biases and norm weights, which start as 0 and 1, are random too, so that a
    missing one is noticed. `dtype` ("bfloat16", "float16") rounds all tensors. Tests share the directory: copy it
    before you damage it.
    """
    written: dict[str, Path] = {}

    def get(family: str = "llama", dtype: str = "float32", **config: object) -> Path:
        key = json.dumps([family, dtype, config], sort_keys=True)
        if key not in written:
            written[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **config)
            _randomise_and_round(written[key], dtype)
        return written[key]

    return get


def _randomise_and_round(model_dir: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = model_dir / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path)
    for name in sorted(tensors):
        if name.endswith((".bias", "norm.weight")):
            tensors[name] += 0.3 * torch.randn(tensors[name].shape, generator=generator)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(getattr(torch, dtype))
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
