"""Two ranks on GPUs compute what one process computes on a GPU. They share one GPU, or have one each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from drafters import perturbed
from node_pair import params
from rank_outputs import NUM_SLOTS, assert_equal, serve

from baton.decode_node.config import DecodeConfig
from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts
from baton.engine.ranks.executor import RankExecutor, RankPrompts
from baton.engine.ranks.ranked_engine import RankedEngine
from baton.engine.rounds.device_executor import executor_of
from baton.engine.sampling.state import SamplingState
from baton.engine.startup import load_engine
from baton.engine.state.pages import Owner, PagePool
from baton.engine.work import BatchRow, Chunk, ChunkRow, CopyPages, Recompute, Tail, Tails
from baton.metadata.errors import RankLost

pytestmark = pytest.mark.usefixtures("no_tf32")


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", attention_bias=True, mlp_bias=True)


@pytest.fixture
def drafter(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A draft model that is often right, divided like the model."""
    draft = perturbed(model, tmp_path / "standalone", 0.05)
    return {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 3}


def config_of(model: Path, **more: Any) -> DecodeConfig:
    settings: dict[str, Any] = {"dtype": "float32", "num_pages": 128} | more
    return DecodeConfig(model=str(model), device="cuda", **settings)


@pytest.mark.parametrize("has_graphs", [False, True], ids=["direct", "graphs"])
def test_two_ranks_give_the_tokens_of_one_process(
    model: Path, drafter: dict[str, Any], devices: list[int], has_graphs: bool
) -> None:
    config = config_of(model, **drafter)
    one = load_engine(config)
    alone, steps = executor_of(one, NUM_SLOTS), (3, 0, 0, 1)
    if has_graphs:
        alone.warm_up()
    theirs = serve(Prompts(one), alone, one.pool, chunk=7, steps=steps)
    with RankedEngine(config, 2, num_slots=NUM_SLOTS, devices=devices) as two:
        assert two.engine.kv.is_cuda and two.engine.kv.shape[3] * 2 == one.kv.shape[3]
        executor, started = RankExecutor(two), time.monotonic()
        if has_graphs:
            executor.warm_up()
            print(f"graphs of two ranks captured in {time.monotonic() - started:.1f} s")
        started = time.monotonic()
        ours = serve(RankPrompts(two), executor, two.engine.pool, chunk=7, steps=steps)
        print(f"served in {time.monotonic() - started:.1f} s")
    assert_equal(ours, theirs)
    assert sum(each.num_accepted for each in ours) > 0


def first_token(prompts: Prompts | RankPrompts, pool: PagePool, ids: list[int]) -> list[int | None]:
    """Compute a prompt in two chunks, and return its first token."""
    pages = pool.allocate(-(-(len(ids) + 8) // pool.page_size), Owner.REQUEST)
    state = SamplingState(params(1), ids, vocab_size=prompts.vocab_size)
    tails = [Tails([Tail(0, [state], [pages], CopyPages((), ()), True, 0)])]
    for begin, end, of_chunk in ((0, 8, []), (8, len(ids), tails)):
        submitted = prompts.submit(Chunk([ChunkRow(1, ids, BatchRow(ids[begin:end], begin, pages))], of_chunk))
        submitted.draft()
        submitted.wait()
    [tail] = submitted.tails
    [first], _ = tail.first_tokens(), tail.wait_rows()
    pool.release(pages)
    return list(first.token_ids)


def test_prompts_by_graphs_of_two_ranks(model: Path, drafter: dict[str, Any], devices: list[int]) -> None:
    config, prompts = config_of(model, **drafter), [list(range(5, 45)), list(range(9, 30)), [3] * 12]
    one = load_engine(config)
    alone = Prompts(one)
    alone.warm_up()
    with RankedEngine(config, 2, num_slots=0, devices=devices) as two:
        ranked = RankPrompts(two)
        ranked.warm_up()
        for ids in prompts:
            assert first_token(ranked, two.engine.pool, ids) == first_token(alone, one.pool, ids)


def _rehearse(num_slots: int, engine: Engine) -> None:
    executor_of(engine, num_slots).rehearse()


def test_pools_of_all_ranks_have_the_same_size(model: Path, devices: list[int]) -> None:
    """Each rank measures what its GPU has left. Ranks that share a GPU ask for little of it."""
    config = config_of(model, num_pages=None, dtype="bfloat16", memory_share=0.05, transport="cuda")
    with RankedEngine(config, 2, num_slots=4, rehearse=partial(_rehearse, 4), devices=devices) as two:
        assert two.engine.pool.num_usable > 100
        executor = RankExecutor(two)  # a rank with fewer pages could not write the last one
        last = two.engine.pool.num_usable
        executor.submit(Recompute([BatchRow([1, 2, 3], 0, [last], 0, 3)], [[1, 2, 3, 4]], num_logprobs=[0]))
        assert len(executor.collect_scores().logprobs[0]) == 3


@pytest.fixture
def watched(model: Path, devices: list[int]) -> Iterator[RankedEngine]:
    with RankedEngine(config_of(model, speculative="none"), 2, num_slots=2, devices=devices) as two:
        two.processes.watch()
        yield two


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_rank_that_dies_ends_the_node_with_one_error(watched: RankedEngine, is_waiting: bool) -> None:
    """Rank 0's kernels stop waiting as soon as its host knows, long before the limit of 60 s."""
    executor = RankExecutor(watched)
    [pid] = watched.processes.pids
    work = Recompute([BatchRow([1, 2, 3], 0, [1], 0, 3)], [[1, 2, 3, 4]], num_logprobs=[0])
    executor.submit(work)
    executor.collect_scores()
    if is_waiting:
        os.kill(pid, signal.SIGSTOP)  # the watch kills it when it is silent
    else:
        os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankLost, match=rf"^rank 1 \(process {pid}\) ended with exit code -9"):
        for _ in range(3):
            executor.submit(work)
            executor.collect_scores()
    assert time.monotonic() - started < (8.0 if is_waiting else 4.0)
    assert not psutil.pid_exists(pid)
    torch.cuda.synchronize()
