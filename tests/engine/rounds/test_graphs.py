"""Which graph serves a batch: the kinds of sampling, and the sizes of buckets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.pace.draft_length import DraftShape
from baton.engine.pace.mixed_sizes import CHUNK_SIZES, MixedSize
from baton.engine.rounds import graphs
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.graphs import graph_sizes
from baton.engine.rounds.sizes import round_sizes
from baton.engine.rounds.step_graphs import StepGraphs
from baton.engine.sampling.state import KINDS, Needs, covering
from baton.kernels.operations import preferring
from baton.metadata.errors import ConfigError
from baton.metadata.wire.request import MAX_TOP_LOGPROBS

NUMS = (None, 0, 1, MAX_TOP_LOGPROBS)
ALL = [Needs(*flags, num) for flags in itertools.product((False, True), repeat=6) for num in NUMS]


def test_buckets_have_graphs_where_there_are_graphs() -> None:
    kv = torch.zeros(1)
    assert graph_sizes(kv, 13) == [], "there are no graphs on a CPU"
    with preferring("triton"):
        assert graph_sizes(kv, 13) == round_sizes(13)


class StandIn:
    """A graph whose replay notes its key."""

    def __init__(self, replayed: list[str], name: str) -> None:
        self.replay = lambda: replayed.append(name)


class Block:
    """Inputs of a bucket."""

    def __init__(self, num_seqs: int) -> None:
        self.num_seqs = num_seqs

    def copy_(self, other: object) -> None: ...

    def fill_with_padding(self, padding: int) -> None: ...


def test_a_graph_of_every_bucket_step_and_kind_is_captured_and_service_captures_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures, replayed = list[str](), list[str]()

    def captured(run: Callable[[], str], pool: object) -> tuple[StandIn, str]:
        captures.append(run())
        return StandIn(replayed, captures[-1]), captures[-1]

    def run(inputs: Any, step: int, needs: Needs) -> str:
        return f"{inputs.num_seqs} {step} {KINDS.index(needs)}"

    monkeypatch.setattr(graphs, "captured", captured)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    blocks: list[Any] = [Block(1), Block(4)]
    owner = graphs.RoundGraphs("rounds", run, blocks, 3, None)
    owner.capture([0, 2])
    assert len(captures) == len(set(captures)) == 2 * 2 * len(KINDS)
    assert [name[0] for name in captures] == sorted((name[0] for name in captures), reverse=True), "largest first"
    before = captures.copy()
    for block in blocks:
        for step in (0, 2):
            for needs in (each for each in ALL[::5] if not each.masks):  # step_graphs.py has those with a grammar
                name = f"{block.num_seqs} {step} {KINDS.index(covering(needs))}"
                assert owner.replay(block, step, needs) == name and replayed[-1] == name
    assert captures == before


@pytest.mark.parametrize("full", ["capture", "columns of the vocabulary", "inputs on the device"])
@pytest.mark.parametrize("start", ["warm_up", "rehearse"])
def test_graphs_that_find_no_memory_at_start_are_refused_in_words(
    start: str, full: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = Engine(EngineConfig(model=str(checkpoint("llama")), device="cpu", threads=1, num_pages=8))
    executor = DeviceExecutor(engine, 5, [1])
    owner, name = {
        "capture": (graphs.RoundGraphs, "capture"),
        "columns of the vocabulary": (executor.slots, "allocate_all"),
        "inputs on the device": (executor.buckets, "allocate_on_device"),
    }[full]
    monkeypatch.setattr(owner, name, fails)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    words = "graphs of rounds of 5 sequences; lower max_running.*--memory-share"
    with preferring("triton"), pytest.raises(ConfigError, match=words):
        getattr(executor, start)()


@pytest.mark.parametrize("expects_prompts", [False, True])
def test_a_rehearsal_captures_the_largest_bucket_beside_the_inputs_of_all(
    expects_prompts: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, mixed = list[list[int]](), list[list[MixedSize]]()
    monkeypatch.setattr(StepGraphs, "capture", lambda graphs, *_: mixed.append(graphs.sizes))
    monkeypatch.setattr(graphs.RoundGraphs, "capture", lambda graphs, *_: captured.append(list(graphs._inputs)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), device="cpu", threads=1, num_pages=8))
    prompts = list[None]()
    monkeypatch.setattr(engine, "capture_prompts", lambda _: prompts.append(None))
    executor = DeviceExecutor(engine, 5, [1, 2, 5])
    with preferring("triton"):
        executor.rehearse(expects_prompts=expects_prompts)
    assert len(prompts) == expects_prompts
    assert captured == [[5]]
    assert mixed == ([[MixedSize(5, DraftShape(0), CHUNK_SIZES[-1])]] if expects_prompts else [[]])
