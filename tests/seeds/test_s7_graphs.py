"""Ranks of a group replay the same graphs. A stand-in for a graph runs its function again;
tests/gpu/test_rank_groups_cuda.py has the real ones."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import perturbed, settings
from node_pair import params
from rank_sequences import RankSequences
from solo import Solo
from thread_ranks import ThreadRanks

from baton.decode_node.config import DecodeConfig
from baton.engine import engine
from baton.engine.prompts import graphs as prompt_graphs
from baton.engine.rounds import device_executor, graphs
from baton.engine.sampling.state import EVERYTHING, GREEDY, SAMPLED
from baton.engine.work import BatchRow, Recompute
from baton.kernels.operations import preferring

GREEDY_REQUEST = ([7, 8, 9, 7, 8, 9, 7], params(12))
SEEDED = ([3, 4], params(9, temperature=0.9, seed=5))
PENALIZED = (list(range(40, 49)), params(9, temperature=0.7, seed=9, repetition_penalty=1.2))


class StandIn:
    """A graph that runs its function again, and writes what came to the static result."""

    def __init__(self, run: Callable[[], Any], result: Any) -> None:
        self._run, self._result = run, result

    def replay(self) -> None:
        _copy(self._result, self._run())


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, tuple):
        for each, new in zip(target, source, strict=True):
            _copy(each, new)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Any]]]:
    """The graphs that each thread has replayed: numbers of sequences, steps and kinds of sampling."""

    def captured(run: Callable[[], Any], pool: object) -> tuple[StandIn, Any]:
        result = run()
        return StandIn(run, result), result

    for module in (graphs, prompt_graphs):
        monkeypatch.setattr(module, "captured", captured)
    for name, value in {"graph_pool_handle": None, "memory_reserved": 0, "empty_cache": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    found: dict[str, list[Any]] = defaultdict(list)
    replay = graphs.RoundGraphs.replay

    def noted(self: Any, inputs: Any, step: Any, needs: Any) -> Any:
        found[threading.current_thread().name].append((inputs.num_seqs, step, graphs.covering(needs)))
        return replay(self, inputs, step, needs)

    monkeypatch.setattr(graphs.RoundGraphs, "replay", noted)
    return found


def test_all_ranks_replay_the_graph_of_the_same_bucket_and_steps(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replayed: dict[str, list[Any]],
) -> None:
    """An idle rank replays padding. Each rank samples as its own sequences ask. Graphs are captured for a chunk beside
    no round."""
    monkeypatch.setattr(device_executor, "captures", lambda _: True)
    model = checkpoint("llama")
    drafting = settings("standalone", model, tmp_path, steps=3)
    drafting["draft_model"] = str(perturbed(model, tmp_path / "often right", 0.05))
    one = Solo(model, **drafting)
    config = DecodeConfig(model=str(model), device="cpu", threads=1, page_size=4, num_pages=64, **drafting)
    with ThreadRanks(2, config, num_slots=4, buckets=(1, 2, 4)) as ranks:
        ranks.do({rank: partial(each.warm_up, expects_prompts=True) for rank, each in enumerate(ranks.executors)})
        assert not ranks.executors[0].mixed_sizes.sizes
        replayed.clear()
        world = RankSequences(ranks, num_pages=64)
        started = world.start({1: GREEDY_REQUEST})
        world.round(3)
        world.round(0)
        started += world.start({1: SEEDED})
        world.round(1, 3)
        started += world.start({0: PENALIZED})
        world.run(3, 0)
        ranks.do({0: lambda: None, 1: lambda: None})
        first, second = ([each for each in found if not isinstance(each[1], int)] for found in replayed.values())
        assert [each[:2] for each in first] == [each[:2] for each in second], "ranks replay unlike graphs"
        assert all(trace == ranks.group.traces[0] for trace in ranks.group.traces)
    shape = world.books[0].shape
    assert first[:2] == second[:2] == [(1, shape, GREEDY), (1, shape.with_steps(0), GREEDY)]
    assert (2, shape, SAMPLED) in second and (2, shape, EVERYTHING) in first
    for sequence, (ids, wanted) in zip(started, (GREEDY_REQUEST, SEEDED, PENALIZED), strict=True):
        theirs = one.run(one.start(ids, wanted), wanted.max_tokens, 3)
        assert sequence.generated[: wanted.max_tokens] == theirs


@pytest.mark.usefixtures("replayed")
def test_chunks_are_padded_to_one_bucket_of_all_ranks(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scored chunk has no graph, so no rank uses one."""
    monkeypatch.setattr(engine, "bucket_sizes", lambda *_, **__: [16, 32])
    config = DecodeConfig(
        model=str(checkpoint("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32)),
        device="cpu",
        threads=1,
        page_size=4,
        num_pages=32,
    )
    plain = Recompute([BatchRow(list(range(5, 15)), 0, [1, 2, 3], 0)], [list(range(5, 16))])
    longer = Recompute([BatchRow(list(range(30, 50)), 0, [4, 5, 6, 7, 8], 0)], [list(range(30, 51))])
    scored = Recompute([BatchRow([3, 4], 0, [9], 0, 2)], [[3, 4, 5]], [], [0])
    with ThreadRanks(2, config, num_slots=2, timeout_s=120.0) as ranks, preferring("triton"):

        def run(*works: Recompute | None) -> tuple[list[torch.Tensor], set[tuple[int, ...]]]:
            """Return the KV of all ranks, and the rows of each that a forward had."""
            for each in ranks.engines:
                each.kv.zero_()
            before = len(ranks.group.traces[0])
            given = {rank: work for rank, work in enumerate(works) if work is not None}
            ranks.do({rank: partial(ranks.executors[rank].submit, work) for rank, work in given.items()})
            ranks.do({0: lambda: None, 1: lambda: None})
            for rank, work in given.items():
                assert not work.is_scored or ranks.executors[rank].collect_scores()
            lens = {operation.lens for operation in ranks.group.traces[0][before:]}
            return [each.kv[:, 1:].clone() for each in ranks.engines], lens

        cases = ((None, plain), (longer, plain), (plain, scored))
        directly = [run(*works) for works in cases]
        assert [lens for _, lens in directly] == [{(0, 10)}, {(20, 10)}, {(10, 2)}]

        ranks.do({rank: each.capture_prompts for rank, each in enumerate(ranks.engines)})
        by_graphs = [run(*works) for works in cases]
    assert [lens for _, lens in by_graphs] == [{(16, 16)}, {(32, 32)}, {(10, 2)}]
    for (kvs, _), (expected, _) in zip(by_graphs, directly, strict=True):
        for ours, theirs in zip(kvs, expected, strict=True):
            assert bool(theirs.any()) == bool(ours.any())
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
