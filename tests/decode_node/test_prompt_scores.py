"""Log-probabilities of a local prompt equal those of a prefill node, however the prompt comes to be computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
from matrix import PAGE_SIZE, start_together
from node_pair import ROUTER_EPOCH, NodePair, node_pairs, params
from thinned import is_whole

from baton.decode_node.sequence import PromptScores
from baton.engine import engine as engines
from baton.metadata.wire.messages import Cancel, Resend
from baton.metadata.wire.request import TokenLogprobs, Unit

MakePair = Callable[..., NodePair]
CHUNK = 6
BOUND = 1e-4  # in float32 (DESIGN P1)


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs() as start:

        def make(model: Path, *, overlaps: bool = False, **both: Any) -> NodePair:
            both = {"page_size": PAGE_SIZE, "num_pages": 200, "max_running": 8, "chunk_tokens": CHUNK, **both}
            return start(model, prefill=both, decode=both, overlaps=overlaps)

        yield make


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * index + 3 * salt + length) % 50 + 1 for index in range(length)]


def submit(
    pair: NodePair, rid: str, prompt: list[int], *, max_tokens: int = 4, is_local: bool = True, **more: Any
) -> None:
    asked = params(max_tokens, temperature=1.0, seed=5, num_logprobs=2)
    pair.submit(rid, prompt, asked, is_local=is_local, prompt_logprobs=True, **more)


def run(pair: NodePair, rid: str, prompt: list[int], **more: Any) -> tuple[TokenLogprobs, ...]:
    submit(pair, rid, prompt, **more)
    pair.step_until(lambda: rid in pair.done and pair.is_done)
    return pair.done[rid].prompt_logprobs


def assert_near(ours: tuple[TokenLogprobs, ...], theirs: tuple[TokenLogprobs, ...]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert len(one.top_ids) == 2 and one.top_ids == other.top_ids
        expected = pytest.approx([other.logprob, *other.top_logprobs], abs=BOUND)
        assert [one.logprob, *one.top_logprobs] == expected


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["none", "eagle"])
@pytest.mark.parametrize("at_once", [4, 1024])
def test_they_are_those_of_a_prefill_node(
    name: str,
    at_once: int,
    checkpoint: Callable[..., Path],
    make_pair: MakePair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit if the scored tokens are computed in the same chunks: the last token then has a chunk of its own
    on the prefill node."""
    monkeypatch.setattr(engines, "SCORED_AT_ONCE", at_once)
    model = checkpoint("llama")
    pair = make_pair(model, **({} if name == "none" else drafters.settings(name, model, tmp_path)))
    for length in (1, 2, CHUNK + 1, 2 * CHUNK, 4 * CHUNK + 1):
        for num, max_tokens in ((1, 1), (1, 4), (3, 4)):
            rid, prompt = f"{length} {num} {max_tokens}", prompt_of(length)
            theirs = run(pair, f"{rid} remote", prompt, max_tokens=max_tokens, is_local=False, n=num)
            ours = run(pair, rid, prompt, max_tokens=max_tokens, n=num)
            assert len(ours) == length - 1
            if length % CHUNK == 1:
                assert ours == theirs, rid
            assert_near(ours, theirs)
            for choice in range(num):
                local, remote = pair.results[rid, choice], pair.results[f"{rid} remote", choice]
                assert local.ids == remote.ids and len(local.ids) == max_tokens


def test_cached_positions_are_computed_again_once_for_all_choices(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair, prompt = make_pair(checkpoint("llama")), prompt_of(30)
    pair.submit("before", prompt, params(3), is_local=True)
    pair.run()
    before = pair.decode.stats().computed_tokens
    scores = run(pair, "r", prompt, n=3)
    num_computed = pair.decode.stats().computed_tokens - before
    assert len(scores) == 29 and num_computed == 29 + 2, "the others compute one token each"
    assert [pair.results["r", choice].ended.num_cached for choice in range(3)] == [0, 28, 28]
    assert pair.done["r"].num_cached == 0


def test_choices_wait_for_the_one_that_computes_the_prompt(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair, prompt = make_pair(checkpoint("llama")), prompt_of(30)
    scores = run(pair, "r", prompt, n=3)
    assert len(scores) == 29 and pair.decode.stats().computed_tokens == 29 + 2, "the others compute one token each"


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_preemption_in_the_middle_of_a_prompt_loses_and_doubles_none(
    overlaps: bool, checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    """A sequence that runs gives way, comes back, and finds pages of its own prompt in the cache, or none."""
    pair, prompt = make_pair(checkpoint("llama"), overlaps=overlaps), prompt_of(4 * CHUNK + 1)
    theirs, places = run(pair, "remote", prompt, is_local=False), range(1, 24, 5 if is_whole() else 10)
    for flushes in (False, True):
        for num_before in places:
            rid = f"{flushes} {num_before}"
            pair.submit(f"other {rid}", [9] * 5, params(40))
            submit(pair, rid, prompt, cache_salt=rid)
            done = pair.decode.stats().computed_tokens
            pair.step_until(lambda done=done: pair.decode.stats().computed_tokens - done >= num_before)  # noqa: B023
            pair.decode.settle()
            (sequence,) = pair.decode.scheduler.find(rid, 0, None)
            assert 0 < sequence.num_computed < len(prompt) - 1 or num_before > 15
            pair.decode.scheduler.preempt(sequence)
            if flushes:
                pair.decode.cache.flush()
            pair.run()
            assert_near(pair.done[rid].prompt_logprobs, theirs)
    assert pair.decode.stats().preemptions == 2 * len(places)


def test_without_memory_for_scores_the_request_that_asks_for_them_ends(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    """Another one has more tokens in the same chunk, and goes on."""
    pair = make_pair(checkpoint("llama"), chunk_tokens=40)
    pair.submit("same", prompt_of(25), params(6), cache_salt="before")
    same = pair.run()["same", 0]
    engine, num_calls = pair.decode.executor.engine, itertools.count()
    score = engine.score

    def scoring(*args: Any) -> Any:
        if next(num_calls) == 0:
            raise torch.OutOfMemoryError("no memory")
        return score(*args)

    engine.score = scoring
    submit(pair, "scored", prompt_of(9))
    pair.submit("longer", prompt_of(25), params(6), is_local=True)
    start_together(pair)
    results = pair.run()
    failed = results["scored", 0].failed
    assert failed is not None and failed.code == "out_of_memory" and failed.retryable
    assert results["longer", 0].ids == same.ids and "scored" not in pair.done
    assert len(run(pair, "again", prompt_of(9))) == 8


def test_a_cancel_in_the_middle_of_a_scored_prompt_frees_everything(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair = make_pair(checkpoint("llama"))
    submit(pair, "r", prompt_of(40))
    pair.step_until(lambda: 0 < pair.decode.stats().computed_tokens < 38)
    pair.send("decode", Cancel(router_epoch=ROUTER_EPOCH, rid="r", attempt=0, choices=None, reason="test"))
    pair.step_until(lambda: pair.decode.is_idle)
    assert not pair.done
    pair.results.clear()


def test_a_router_that_lost_them_is_told_that_they_are_gone(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    """A router that lacks tokens gets these. One that has all tokens asks for the log-probabilities."""
    pair = make_pair(checkpoint("llama"))
    for rid in ("scored", "plain"):
        pair.submit(rid, prompt_of(9), params(4), is_local=True, prompt_logprobs=rid == "scored")
    pair.run()
    for rid, first in itertools.product(("scored", "plain"), (2, 4)):
        pair.send("decode", Resend(router_epoch=ROUTER_EPOCH, unit=Unit(rid, 0, 0), first=first))
    pair.step_until(lambda: pair.results["scored", 0].failed)
    failed = pair.results["scored", 0].failed
    assert failed is not None and (failed.code, failed.retryable) == ("unavailable", True)
    for _ in range(20):
        pair.step()
    assert pair.results["plain", 0].failed is None


@pytest.mark.parametrize("name", ["none", "eagle"])
@pytest.mark.parametrize("is_full", [False, True])
def test_they_are_computed_again_though_all_tokens_are_there(
    name: str, is_full: bool, checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path
) -> None:
    """The router asks for a request whose output has ended: by max_tokens or because its context is full."""
    model, prompt = checkpoint("llama"), prompt_of(CHUNK + 1)
    settings = {} if name == "none" else drafters.settings(name, model, tmp_path)
    pair = make_pair(model, context_len=CHUNK + 1 + 4, **settings)
    theirs = run(pair, "remote", prompt, is_local=False)
    received = pair.results["remote", 0].ids
    assert len(received) == 4
    ours = run(pair, "again", prompt, received=received, max_tokens=9 if is_full else 4)
    assert ours == theirs
    assert pair.results["again", 0].ended is not None


def test_a_pulled_prompt_is_not_scored_by_the_decode_node(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"))
    submit(pair, "r", prompt_of(12), is_local=False)
    pair.step_until(lambda: pair.decode.scheduler.running)
    (sequence,) = pair.decode.scheduler.running
    assert sequence.prompt_scores is None
    pair.run()


# --- the collection alone ---


def entries(*values: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(value) for value in values]


def test_positions_score_the_tokens_after_them_up_to_the_end_of_the_prompt() -> None:
    scores = PromptScores(5)
    assert [scores.num_scored(start, 4) for start in (0, 2, 4, 5, 9)] == [4, 3, 1, 0, 0]


def test_what_is_computed_twice_counts_once() -> None:
    scores = PromptScores(5)
    scores.take(0, entries(-1, -2, -3))
    assert not scores.is_complete and scores.num_skippable == 3
    scores.take(2, entries(-3.5, -4, -5))
    assert scores.is_complete and scores.logprobs == entries(-1, -2, -3.5, -4, -5)


def test_a_gap_is_a_defect() -> None:
    with pytest.raises(AssertionError, match=r"\(1, 0\)"):
        PromptScores(5).take(1, entries(-1))
