"""Two ranks in two processes compute what one process computes. One pair of processes runs all tests of a way to
divide the model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from drafters import perturbed
from forked import forked_ranks
from heads import write_head
from rank_outputs import NUM_SLOTS, REQUESTS, Output, assert_equal, serve
from solo import Running

from baton.decode_node.config import DecodeConfig
from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts
from baton.engine.ranks.executor import RankExecutor, RankPrompts
from baton.engine.ranks.ranked_engine import RankedEngine
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.executor import Executor
from baton.engine.rounds.rounds import LocalChunk, Rounds
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner, PagePool
from baton.engine.work import BatchRow, Recompute
from baton.metadata.errors import RankLost
from baton.metadata.wire.request import SamplingParams


def _config(model: Path, **more: Any) -> DecodeConfig:
    return DecodeConfig(model=str(model), device="cpu", threads=1, page_size=4, num_pages=128, **more)


# --- all ranks have all sequences, and some heads of each layer ---


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A draft model that is often right. Each rank has all of it."""
    draft = perturbed(model, tmp_path_factory.mktemp("draft") / "standalone", 0.05)
    return {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 3}


@pytest.fixture(scope="module")
def one(model: Path, drafter: dict[str, Any]) -> Engine:
    return Engine(_config(model, **drafter))


class Pairs:
    """The pair of processes that a test asks for. It serves the tests after it until one asks for another pair: a
    process can be in one group at a time."""

    def __init__(self, model: Path, drafter: dict[str, Any]) -> None:
        self._model, self._drafter = model, drafter
        self._wanted: dict[str, Any] = {}
        self._ranked: RankedEngine | None = None

    def get(self, **settings: Any) -> RankedEngine:
        """Return two ranks of a model with the drafter, or with other `settings`."""
        if self._ranked is None or self._wanted != settings:
            self.close()
            config, self._wanted = _config(self._model, **(settings or self._drafter)), settings
            with forked_ranks():
                self._ranked = RankedEngine(config, 2, num_slots=NUM_SLOTS)
        return self._ranked

    def close(self) -> None:
        if self._ranked is not None:
            self._ranked.close()
        self._ranked = None


@pytest.fixture(scope="module")
def pairs(model: Path, drafter: dict[str, Any]) -> Iterator[Pairs]:
    pairs = Pairs(model, drafter)
    yield pairs
    pairs.close()


def test_a_rank_has_its_heads_and_hidden_units_only(pairs: Pairs, one: Engine) -> None:
    two = pairs.get()
    [pid] = two.processes.pids
    assert pid != os.getpid() and psutil.pid_exists(pid)
    assert two.engine.kv.shape[3] * 2 == one.kv.shape[3] == 2
    assert two.engine.schema == one.schema, "the schema describes the whole page"
    layers = [engine.model.stack.layers[0].body for engine in (two.engine, one)]  # type: ignore[attr-defined]
    assert layers[0].attention.qkv.out_size * 2 == layers[1].attention.qkv.out_size
    assert layers[0].mlp.gate_up.out_size * 2 == layers[1].mlp.gate_up.out_size
    assert layers[0].mlp.down.in_size * 2 == layers[1].mlp.down.in_size


@pytest.mark.each_value
@pytest.mark.parametrize("steps", [(0,), (3, 0, 0, 1)], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("chunk", [3, 64])
def test_two_ranks_give_the_tokens_of_one_process(pairs: Pairs, one: Engine, chunk: int, steps: Any) -> None:
    two = pairs.get()
    ours = serve(RankPrompts(two), RankExecutor(two), two.engine.pool, chunk=chunk, steps=steps)
    theirs = serve(Prompts(one), DeviceExecutor(one, NUM_SLOTS), one.pool, chunk=chunk, steps=steps)
    assert_equal(ours, theirs)
    assert (sum(each.num_accepted for each in ours) > 0) == (steps != (0,))


def test_a_rank_that_dies_ends_the_node_with_one_error(pairs: Pairs) -> None:
    two = pairs.get()
    executor = RankExecutor(two)
    [pid] = two.processes.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankLost, match=rf"^rank 1 \(process {pid}\) ended with exit code -9; all ranks were ended"):
        executor.submit(Recompute([BatchRow([1, 2, 3], 0, [1])], [[1, 2, 3, 4]]))
    assert not psutil.pid_exists(pid)
    with pytest.raises(RankLost, match="exit code -9"):  # it stays so
        executor.submit(Recompute([BatchRow([1, 2, 3], 0, [1])], [[1, 2, 3, 4]]))
    pairs.close()


def test_a_drafter_on_the_host_proposes_on_rank_0_alone(pairs: Pairs, model: Path) -> None:
    settings = {"speculative": "ngram", "draft_steps": 3}
    alone = Engine(_config(model, **settings))
    theirs = serve(Prompts(alone), DeviceExecutor(alone, NUM_SLOTS), alone.pool, chunk=5, steps=(3,))
    two = pairs.get(**settings)
    ours = serve(RankPrompts(two), RankExecutor(two), two.engine.pool, chunk=5, steps=(3,))
    assert_equal(ours, theirs)
    assert sum(each.num_accepted for each in ours) > 0


def admit_local(rounds: Rounds, pool: PagePool, ids: list[int], wanted: SamplingParams) -> Running:
    """Return a sequence in a slot, with pages, whose prompt is to be computed."""
    pages = pool.allocate(-(-(len(ids) + wanted.max_tokens + 16) // pool.page_size), Owner.REQUEST)
    state = SamplingState(wanted, ids, vocab_size=rounds.executor.vocab_size)
    sequence = Running(len(ids), list(ids), 0, pages, state, lacks_draft=True)
    rounds.admit(sequence, None)
    return sequence


def finish(rounds: Rounds, pool: PagePool, running: list[tuple[Running, Output]], num_rounds: int) -> list[Output]:
    """Run rounds of 3 drafts, release all, and return the outputs."""
    for _ in range(num_rounds):
        result = rounds.run([each for each, _ in running], rounds.shape, [3] * len(running))
        for (sequence, output), accepted in zip(running, result.rows, strict=True):
            assert accepted is not None
            output.take(sequence, accepted)
    for sequence, _ in running:
        rounds.release(sequence)
        pool.release(sequence.pages)
    return [output for _, output in running]


def local_outputs(executor: Executor, pool: PagePool) -> list[Output]:
    """Compute the prompts of all requests in chunks of 5 as local prompts, then run rounds of 3 drafts. The outputs
    have the log-probabilities of the prompts, too."""
    rounds, running = Rounds(executor), list[tuple[Running, Output]]()
    for ids, wanted in REQUESTS:
        sequence = admit_local(rounds, pool, ids, wanted)
        output = Output()
        for begin in range(0, len(ids) - 1, 5):
            stop = min(begin + 5, len(ids) - 1)
            rounds.recompute([sequence], [BatchRow(ids[begin:stop], begin, sequence.pages, 0, stop - begin)])
            [logprobs] = rounds.collect_scores().logprobs
            output.logprobs += logprobs
        assert len(output.logprobs) == len(ids) - 1
        running.append((sequence, output))
    return finish(rounds, pool, running, 12)


def test_two_ranks_compute_local_prompts_as_one_process(pairs: Pairs, model: Path, tmp_path: Path) -> None:
    settings = {"speculative": "eagle", "draft_model": str(write_head(tmp_path / "eagle", "eagle", model))}
    alone = Engine(_config(model, draft_steps=3, **settings))
    theirs = local_outputs(DeviceExecutor(alone, NUM_SLOTS), alone.pool)
    two = pairs.get(draft_steps=3, **settings)
    ours = local_outputs(RankExecutor(two), two.engine.pool)
    assert_equal(ours, theirs)
    assert [each.num_accepted for each in ours] == [each.num_accepted for each in theirs]


def beside_outputs(executor: Executor, pool: PagePool) -> list[Output]:
    """Compute the prompts of all requests but the first beside the rounds of the first, then run rounds of all."""
    rounds, running = Rounds(executor), list[tuple[Running, Output]]()
    for ids, wanted in REQUESTS:
        sequence = admit_local(rounds, pool, ids, wanted)
        for begin in range(0, len(ids) - 1, 5):
            stop = min(begin + 5, len(ids) - 1)
            rows = [BatchRow(ids[begin:stop], begin, sequence.pages, 0)]
            if not running:
                rounds.recompute([sequence], rows)
                continue
            shape, beside = rounds.shape.with_steps(begin % 2 * 3), LocalChunk([sequence], rows)
            result = rounds.collect(
                rounds.submit([each for each, _ in running], shape, [shape.num_steps] * len(running), beside)
            )
            for (each, output), accepted in zip(running, result.rows, strict=True):
                assert accepted is not None
                output.take(each, accepted)
        running.append((sequence, Output()))
    return finish(rounds, pool, running, 5)


def test_two_ranks_compute_prompts_beside_rounds_as_one_process(pairs: Pairs, model: Path, tmp_path: Path) -> None:
    settings = {"speculative": "eagle", "draft_model": str(write_head(tmp_path / "eagle", "eagle", model))}
    alone = Engine(_config(model, draft_steps=3, **settings))
    theirs = beside_outputs(DeviceExecutor(alone, NUM_SLOTS), alone.pool)
    two = pairs.get(draft_steps=3, **settings)
    ours = beside_outputs(RankExecutor(two), two.engine.pool)
    assert_equal(ours, theirs)
    assert [each.num_accepted for each in ours] == [each.num_accepted for each in theirs]
