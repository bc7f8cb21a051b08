"""Two ranks with sequences of their own on GPUs give the tokens of one process on a GPU. They share one GPU, or have
one each."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from drafters import perturbed, settings, target_of
from own_ranks import OwnRanks
from rank_outputs import REQUESTS, serve

from baton.decode_node.config import DecodeConfig
from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts
from baton.engine.ranks.own_work_executor import OwnWorkExecutor
from baton.engine.ranks.own_work_prompts import OwnWorkPrompts
from baton.engine.ranks.ranked_engine import RankedEngine, executor_of
from baton.engine.rounds.graphs import graph_sizes
from baton.engine.startup import load_engine
from baton.engine.work import BatchRow, Recompute, WarmUp
from baton.kernels import operations

pytestmark = pytest.mark.usefixtures("no_tf32")

NUM_SLOTS, NUM_PAGES, CHUNK = 4, 128, 7
WAYS = ("reference", "direct", "graphs")  # operations of torch, on zero rows; kernels on padding; their graphs


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Switch our kernels off, in the ranks too, but for those of ranks and pages."""
    monkeypatch.setenv("BATON_TRITON", "0")
    operations.forget()
    yield
    monkeypatch.undo()
    operations.forget()


def config_of(model: Path, **more: Any) -> DecodeConfig:
    common: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_pages": NUM_PAGES, "transport": "cuda"}
    return DecodeConfig(model=str(model), **(common | more))


def drafting_of(name: str, model: Path, directory: Path) -> dict[str, Any]:
    if name == "none":
        return {"speculative": "none"}
    drafting = settings(name, model, directory, steps=3)
    if name == "standalone":
        drafting["draft_model"] = str(perturbed(model, directory / "often right", 0.05))
    return drafting


def started(config: DecodeConfig, devices: list[int], num_slots: int = NUM_SLOTS) -> RankedEngine:
    return RankedEngine(config, 2, num_slots=num_slots, divides_sequences=True, devices=devices)


def executor_on(two: RankedEngine) -> OwnWorkExecutor:
    return OwnWorkExecutor(two, graph_sizes(two.engine.kv, two.num_slots))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["standalone", "eagle3", "none"])
def test_two_ranks_give_the_tokens_of_one_process(
    name: str,
    way: str,
    devices: list[int],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Each rank is idle in prefill, in rounds with and without drafts, in catching up and in recomputing. The sequences
    have unlike lengths, and greedy and seeded sampling."""
    if way == "reference":
        request.getfixturevalue("without_kernels")
    model = target_of(name, checkpoint, attention_bias=True, mlp_bias=True)
    config = config_of(model, **drafting_of(name, model, tmp_path))
    one, steps = load_engine(config), (0,) if name == "none" else (3, 0, 0, 1)
    alone = executor_of(one, NUM_SLOTS)
    theirs = serve(Prompts(one), alone, one.pool, chunk=CHUNK, steps=steps)
    del alone
    first, second, third = REQUESTS
    with started(config, devices) as two:
        assert two.engine.kv.is_cuda and two.engine.kv.shape == one.kv.shape, "a rank has all heads"
        executor, begun = executor_on(two), time.monotonic()
        if way == "graphs":
            executor.warm_up(expects_prompts=True)
            print(f"graphs of two ranks captured in {time.monotonic() - begun:.1f} s")
            assert two.engine.prompt_sizes.sizes
        world, most, begun = OwnRanks(executor, num_pages=NUM_PAGES), max(steps), time.monotonic()
        [two_] = world.start({1: second}, chunk=CHUNK)
        for num_steps in (0, most, 0, min(1, most)):
            world.round(num_steps)
        world.recompute(1, two_)
        [one_] = world.start({0: first}, chunk=CHUNK)
        world.round(most)
        [three] = world.start({0: third}, chunk=CHUNK)
        world.run(*steps)
        print(f"served in {time.monotonic() - begun:.1f} s")
    assert {(0, 1), (1, 1), (2, 1)} <= world.lens
    for sequence, wanted in zip((one_, two_, three), theirs, strict=True):
        num_tokens = sequence.sampling.params.max_tokens
        assert sequence.generated[:num_tokens] == wanted.token_ids[:num_tokens]
    assert name != "standalone" or sum(sum(each.num_accepted) for each in (one_, two_, three)) > 10


@pytest.mark.parametrize("has_graphs", [False, True], ids=["direct", "graphs"])
def test_prompts_of_a_prefill_node(
    has_graphs: bool, devices: list[int], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Both ranks compute prompts of unlike lengths at once; then one of them is idle. They give the first tokens and
    the metadata rows of one process."""
    model = target_of("eagle3", checkpoint)
    config = config_of(model, **drafting_of("eagle3", model, tmp_path))
    one = load_engine(config)
    with started(config, devices, num_slots=0) as two:
        executor = executor_on(two)
        prompts = OwnWorkPrompts(executor)
        if has_graphs:
            prompts.warm_up()
            assert two.engine.prompt_sizes.sizes
        world, alone = _Prompts(partial(prompts.run)), Prompts(one)
        for lengths in ((40, 9), (0, 30), (150, 3), (12, 0)):
            assert world.first_tokens(lengths) == _alone(alone, lengths), lengths


class _Prompts:
    """Runs whole prompts, one on each rank."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def first_tokens(self, lengths: tuple[int, ...]) -> list[Any]:
        reports = self._run([_chunk(length) if length else None for length in lengths])
        return [[each.token_ids for each in tokens] for report in reports for tokens in report.first_tokens]


def _alone(prompts: Prompts, lengths: tuple[int, ...]) -> list[Any]:
    found: list[Any] = []
    for length in filter(None, lengths):
        submitted = prompts.submit(_chunk(length))
        submitted.draft()
        submitted.wait()
        found += [[each.token_ids for each in tails.first_tokens()] for tails in submitted.tails]
    return found


def _chunk(length: int) -> Any:
    from node_pair import params

    from baton.engine.sampling.state import SamplingState
    from baton.engine.work import Chunk, ChunkRow, CopyPages, Tail, Tails

    ids = [(7 * at + length) % 90 + 1 for at in range(length)]
    pages = list(range(1, -(-(length + 8) // 16) + 1))
    state = SamplingState(params(4, temperature=0.8, seed=length), ids, vocab_size=512)
    tails = [Tails([Tail(0, [state], [pages], CopyPages((), ()), True, 0)])]
    return Chunk([ChunkRow(length, ids, BatchRow(ids, 0, pages))], tails)


def test_rank_0_hands_over_the_pages_of_all_ranks(devices: list[int], checkpoint: Callable[..., Path]) -> None:
    """The pages of rank 1 that rank 0 sees are those that rank 1 computes with: a copy has the same checksums, and a
    page that rank 0 overwrites changes what rank 1 attends to."""
    ids = list(range(3, 3 + 32))
    with started(config_of(checkpoint("llama"), speculative="none"), devices) as two:
        executor, pools, memory = executor_on(two), two.engine.device_pool, two.engine.memory
        assert pools is not None and len(pools.shared) == 2 and memory[0].num_pages == 2 * NUM_PAGES
        work = Recompute([BatchRow(ids, 0, [1, 2])], [[*ids, 1]])
        executor.run([work, None])
        executor.run([None, work])
        here, there = pools.digest([1, 2]), pools.digest([NUM_PAGES + 1, NUM_PAGES + 2])
        assert len({*here}) == len({*there}) == 2
        pools.store([NUM_PAGES + 1])
        memory[0].pages[:, 9] = memory[0].pages[:, NUM_PAGES + 1]
        assert pools.load([9]) == there[:1]
        assert two.engine.kv[:, 9].cpu().numpy().tobytes() == memory[0].pages[:, NUM_PAGES + 1].tobytes()

        def score(rank: int) -> float:
            scored = Recompute([BatchRow(ids[16:], 16, [1, 3], 0, 16)], [[*ids, 1]], [], [0])
            works: list[Any] = [None, None]
            works[rank] = scored
            return executor.run(works)[rank].logprobs[0][0].logprob  # type: ignore[union-attr]

        before = score(1)
        memory[0].pages[:, NUM_PAGES + 1] = 0
        pools.load([NUM_PAGES + 1])
        assert score(1) != before and score(0) == pytest.approx(before, abs=1e-4)


def _rehearse(num_slots: int, engine: Engine) -> None:
    executor_of(engine, num_slots).rehearse(expects_prompts=True)


def test_pools_of_all_ranks_have_the_same_size(devices: list[int], checkpoint: Callable[..., Path]) -> None:
    """Each rank measures what its GPU has left. Ranks that share a GPU ask for little of it."""
    config = config_of(checkpoint("llama"), num_pages=None, dtype="bfloat16", memory_share=0.05, speculative="none")
    with RankedEngine(
        config, 2, num_slots=4, divides_sequences=True, rehearse=partial(_rehearse, 4), devices=devices
    ) as two:
        last, executor = two.engine.pool.num_usable, executor_on(two)
        assert last > 100 and two.engine.memory[0].num_pages == 2 * (last + 1)
        scored = Recompute([BatchRow([1, 2, 3], 0, [last], 0, 3)], [[1, 2, 3, 4]], [], [0])
        reports = executor.run([scored, scored])  # a rank with fewer pages could not write the last one
        assert all(len(report.logprobs[0]) == 3 for report in reports)  # type: ignore[union-attr]
        executor.capture(WarmUp(expects_prompts=True))  # graphs over the pools of that size
