"""Ranks with sequences of their own, in two processes, give the tokens of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafters import perturbed, settings, target_of
from forked import forked_ranks
from node_pair import params
from own_ranks import OwnRanks
from solo import Solo
from thread_ranks import ThreadRanks

from baton.decode_node.config import DecodeConfig
from baton.engine.ranks.own_work_executor import OwnWorkExecutor
from baton.engine.ranks.ranked_engine import RankedEngine
from baton.engine.work import BatchRow, Chunk, ChunkReport, ChunkRow, Forget, Recompute, Round, Scores

REQUESTS = {
    0: ([7, 8, 9, 7, 8, 9, 7, 8], params(24, num_logprobs=3)),
    1: ([3], params(16, temperature=0.7, seed=9, top_k=40, repetition_penalty=1.2, num_logprobs=3)),
}
LATE = (list(range(40, 63)), params(24, temperature=0.9, seed=5))


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", attention_bias=True, mlp_bias=True)


DRAFTERS = ("standalone", "ngram", "eagle3", "mtp3-deepseek", "frozen-kv-mtp", "hyper-eagle")


def _config(model: Path, **more: Any) -> DecodeConfig:
    return DecodeConfig(model=str(model), device="cpu", threads=1, page_size=4, num_pages=128, **more)


@pytest.mark.parametrize("name", DRAFTERS if "BATON_WHOLE_MATRIX" in os.environ else DRAFTERS[:1])
def test_processes_with_sequences_of_their_own_give_the_tokens_of_one(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Some rounds have no sequence on rank 0. Every handoff row comes from the rank itself. With
    BATON_WHOLE_MATRIX=1 all kinds of drafters run."""
    model = target_of(name, checkpoint, attention_bias=True, mlp_bias=True)
    drafting = settings(name, model, tmp_path, steps=3)
    if name == "standalone":
        drafting["draft_model"] = str(perturbed(model, tmp_path / "often right", 0.05))
    one = Solo(model, **drafting)
    with forked_ranks(), RankedEngine(_config(model, **drafting), 2, num_slots=8, divides_sequences=True) as ranked:
        world = OwnRanks(OwnWorkExecutor(ranked))
        assert ranked.engine.kv.shape[3] == one.engine.kv.shape[3], "a rank has all heads"
        started = world.start({1: LATE}, chunk=5)
        world.round(3)
        started += world.start(REQUESTS, chunk=5)
        world.round(3, 1)
        world.run(3, 0)
    assert {(0, 1), (1, 2)} <= world.lens
    for sequence, (ids, wanted) in zip(started, [LATE, *REQUESTS.values()], strict=True):
        theirs = one.run(one.start(ids, wanted), wanted.max_tokens, 3)
        assert sequence.generated[: wanted.max_tokens] == theirs
    assert name != "standalone" or sum(sum(sequence.num_accepted) for sequence in started) > 20


def test_each_rank_reports_its_own_work(model: Path) -> None:
    """Log-probabilities, scores of prompts and first tokens come from the rank that computed them."""
    ids, _ = REQUESTS[0]
    with ThreadRanks(2, _config(model, speculative="ngram")) as ranks:
        executor = ranks.executor
        chunk = Chunk([ChunkRow(1, ids, BatchRow(ids[:-1], 0, [1, 2], 1, 7), 2)], [])
        scored = executor.run([None, chunk])
        assert executor.run([None, Forget(1)]) == [None, None]
        alone = executor.run([chunk, None])
        assert isinstance(scored[1], ChunkReport) and isinstance(alone[0], ChunkReport)
        for report in (scored[1], alone[0]):
            [tokens] = report.scores.logprobs
            assert len(tokens) == 7 and all(len(each.top_ids) == 2 for each in tokens)
        assert [each.top_ids for each in scored[1].scores.logprobs[0]] == [
            each.top_ids for each in alone[0].scores.logprobs[0]
        ]
        again = Recompute([BatchRow(ids[:-1], 0, [1, 2], 0, 7)], [ids], [], [1])
        other, report = executor.run([None, again])
        assert other is None and isinstance(report, Scores) and len(report.logprobs[0]) == 7


def test_ranks_do_not_mix_up_the_texts_in_which_proposals_are_found(model: Path) -> None:
    """Both sequences have slot 7. Each finds proposals in its own text."""
    with ThreadRanks(2, _config(model, speculative="ngram", draft_steps=3)) as ranks:
        queues = ranks.executor.queues
        for queue, text in zip(queues, ([1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 5, 6]), strict=True):
            assert queue.proposer is not None
            assert queue.proposer.lookup(7, text, "", 2) == text[2:4]
        for queue, more in zip(queues, ([1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 8, 5, 6, 7]), strict=True):
            assert queue.proposer is not None
            assert queue.proposer.lookup(7, more, "", 2) == more[3:5]
            assert queue.proposer.replay(7, [*more, more[3]], "", 1, 1) == (1, 1)
            queue.proposer.forget(7, more, "")


def test_the_works_of_a_rank_wait_for_those_of_the_others(model: Path) -> None:
    with ThreadRanks(2, _config(model, speculative="ngram", draft_steps=3)) as ranks:
        world = OwnRanks(ranks.executor)
        world.start(REQUESTS)
        shape = world.books[0].shape
        first = world.books[0].submit(world.running[0], shape, [3])
        num_operations = len(ranks.group.traces[0])
        second = world.books[1].submit(world.running[1], shape, [3])
        assert len(ranks.group.traces[0]) == num_operations, "no rank begins before the works of all are there"
        assert [type(queue.works[-1]) for queue in ranks.executor.queues] == [Round, Round]
        assert len(world.books[1].collect(second).rows) == 1
        num_operations = len(ranks.group.traces[0])
        assert len(world.books[0].collect(first).rows) == 1
        assert len(ranks.group.traces[0]) == num_operations, "both rounds were one"


def test_a_rank_that_fails_ends_the_work_of_all(model: Path) -> None:
    ids, _ = REQUESTS[0]
    with ThreadRanks(2, _config(model, speculative="ngram")) as ranks:
        bad = Recompute([BatchRow([10**6], 0, [1])], [[10**6, 2]])  # no such token
        with pytest.raises(IndexError):
            ranks.executor.run([Recompute([BatchRow(ids, 0, [1, 2])], [[*ids, 1]]), bad])
    with ThreadRanks(2, _config(model, speculative="ngram"), timeout_s=1.0) as ranks:
        ranks.workers[1].do = lambda lens, work: None  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="rank 0 waited in gather for a rank that did not come"):
            ranks.executor.run([Recompute([BatchRow(ids, 0, [1, 2])], [[*ids, 1]]), None])


def test_a_warm_up_runs_every_kind_of_work_on_all_ranks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """No rank is idle in it: kernels compile on each."""
    model = target_of("eagle", checkpoint)
    with ThreadRanks(2, _config(model, **settings("eagle", model, tmp_path, steps=3))) as ranks:
        done: list[tuple[str, int]] = []
        run = ranks.executor.run

        def noted(works: Any) -> Any:
            assert None not in works
            done.append((type(works[0]).__name__, getattr(works[0], "num_rows", 0)))
            return run(works)

        ranks.executor.run = noted  # type: ignore[method-assign]
        [queue, _] = ranks.executor.queues
        queue.warm_up()
        assert done == [("Recompute", 0), ("CatchUp", 1), ("CatchUp", 4), ("Round", 0), ("Round", 0)]
        assert ranks.group.traces[1] == ranks.group.traces[0]
        assert not queue.works and queue.num_chunks_ahead == 0
        assert not queue.joint_sizes.holds(1, 3, 16), "a chunk has a forward of its own"
        assert not queue.joint_sizes.lengths(1, 3)
