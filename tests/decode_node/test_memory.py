"""The decode node with a device whose memory really runs out (tests/support/devices/memory_limit.py).

A round without memory is tried again with less: without drafts, or without one sequence. The others' text is that of a
run with enough memory, token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from drafters import settings, target_of
from matrix import start_together
from memory_limit import MemoryLimit
from node_pair import NodePair, Result, node_pairs, params
from thinned import thinned

from baton.engine.pace.mixed_sizes import MixedSizes
from baton.engine.work import MAX_MISSED, Recompute, Round, RoundWork
from baton.metadata.errors import OutOfMemory
from baton.metadata.wire.request import SamplingParams

NUM_REQUESTS, NUM_TOKENS = 8, 8
PLAIN = params(NUM_TOKENS)
SCORED = params(NUM_TOKENS, temperature=1.0, top_p=0.9, num_logprobs=3)
GREEDY = params(NUM_TOKENS, num_logprobs=3)
PENALIZED = params(NUM_TOKENS, temperature=0.8, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=1)

MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[MakePair]:
    """`make_pair("eagle", overlaps=True)`: a pair with this drafter. At the end its books are checked."""
    with node_pairs() as start:

        def make(drafter: str = "none", *, overlaps: bool = False) -> NodePair:
            model = target_of(drafter, checkpoint)
            both = {"page_size": 4, "max_running": NUM_REQUESTS + 1, "chunk_tokens": 40}
            both |= {} if drafter == "none" else settings(drafter, model, tmp_path, steps=3)
            return start(model, prefill=both, decode=both, overlaps=overlaps)

        yield make


def prompt(number: int, num_tokens: int = 6) -> list[int]:
    return [(7 * number + 5 * place * place) % 400 + 3 for place in range(num_tokens)]


def run(pair: NodePair, wants: Sequence[SamplingParams], **more: Any) -> list[Result]:
    """Serve requests from empty caches, and return their results. All are in the first round."""
    for node in (pair.prefill, pair.decode):
        node.cache.flush()
    count = len(pair.results)
    names = [f"{count} {number}" for number in range(len(wants))]
    for number, each in enumerate(wants):
        pair.submit(names[number], prompt(number), each, **more)
    start_together(pair)
    pair.run()
    return [pair.results[name, 0] for name in names]


def peak_of(pair: NodePair, wants: Sequence[SamplingParams], **more: Any) -> tuple[list[Result], int]:
    """Serve requests with enough memory. Return their results, and the most bytes that work of the device took."""
    memory = MemoryLimit()
    with memory.around(pair.decode.executor, "submit"):
        results = run(pair, wants, **more)
    assert all(result.failed is None and len(result.ids) == NUM_TOKENS for result in results)
    return results, memory.peak


def run_within(limit: int, pair: NodePair, wants: Sequence[SamplingParams], **more: Any) -> list[Result]:
    """Serve requests with so much memory. Then the books must balance and another request be served."""
    memory = MemoryLimit(limit)
    with memory.around(pair.decode.executor, "submit"):
        results = run(pair, wants, **more)
        assert memory.num_failures
        pair.check_books()
        pair.submit("after", prompt(99), wants[-1])
        assert len(pair.run()["after", 0].ids) == NUM_TOKENS
    assert memory.num_bytes < limit / 4, "what a round took is free again"
    return results


def check(results: Sequence[Result], expected: Sequence[Result], ended: Sequence[int]) -> None:
    """Check that just the requests `ended` have one error each, and all others the expected tokens and scores."""
    failed = [number for number, result in enumerate(results) if result.failed is not None]
    assert failed == list(ended)
    for number, (result, clean) in enumerate(zip(results, expected, strict=True)):
        if number not in failed:
            assert result.ids == clean.ids and result.ended is not None, number
            assert [score.top_ids for score in result.logprobs] == [score.top_ids for score in clean.logprobs]
            scores, right = (
                [value for each in found.logprobs for value in (each.logprob, *each.top_logprobs)]
                for found in (result, clean)
            )
            assert scores == pytest.approx(right, abs=1e-4)
            continue
        assert result.failed is not None and result.ended is None
        assert (result.failed.code, result.failed.retryable) == ("out_of_memory", True)
        assert "no memory left for" in result.failed.message and "max_running" in result.failed.message
        assert result.ids == clean.ids[: len(result.ids)] and len(result.ids) >= 1


def seeded(wants: SamplingParams, count: int = NUM_REQUESTS) -> list[SamplingParams]:
    return [params(**{**as_dict(wants), "seed": number}) for number in range(count)]


def as_dict(wants: SamplingParams) -> dict[str, Any]:
    return {name: getattr(wants, name) for name in wants.__struct_fields__}


@pytest.mark.parametrize(  # each pair of values, not all three together
    ("wants", "num_fitting", "overlaps"),
    [
        pytest.param(
            *(wants, num_fitting, (kind + at) % 2 == 1),
            id=f"{name}-{num_fitting}",
            marks=[pytest.mark.whole] * ((kind + 2 * at) % 3 != 0),
        )
        for kind, (name, wants) in enumerate([("filtered", SCORED), ("penalized", PENALIZED), ("greedy", GREEDY)])
        for at, num_fitting in enumerate([1, 3, 7])
    ],
)
def test_the_fewest_sequences_end_of_a_round_that_does_not_fit(
    wants: SamplingParams, num_fitting: int, overlaps: bool, make_pair: MakePair
) -> None:
    """Greedy rounds take most for their log-probabilities, when they have moved the slots on already."""
    pair = make_pair(overlaps=overlaps)
    every = seeded(wants)
    expected, _ = peak_of(pair, every)
    _, fitting = peak_of(pair, every[:num_fitting])
    _, too_large = peak_of(pair, every[: num_fitting + 1])
    assert too_large > fitting
    results = run_within((fitting + too_large) // 2, pair, every)
    check(results, expected, range(num_fitting, NUM_REQUESTS))


@pytest.mark.parametrize("overlaps", thinned([False, True], lambda i, _: i == 1))
def test_the_one_sequence_ends_whose_sampling_takes_most(overlaps: bool, make_pair: MakePair) -> None:
    """It is the oldest. The others are more, and none of them needs to end."""
    pair = make_pair(overlaps=overlaps)
    wants = [SCORED, *[PLAIN] * (NUM_REQUESTS - 1)]
    expected, too_large = peak_of(pair, wants)
    _, fitting = peak_of(pair, wants[1:])
    _, smaller = peak_of(pair, wants[:-1])
    limit = (fitting + smaller) // 2
    assert fitting < limit < smaller < too_large, "to end any other would not do"
    check(run_within(limit, pair, wants), expected, [0])


@pytest.mark.parametrize(
    ("drafter", "overlaps"),
    thinned(
        [
            ("ngram", True),
            ("eagle", False),
            ("eagle", True),
            ("eagle3", True),
            ("standalone", False),
            ("mtp3-deepseek", True),
        ],
        lambda i, *_: i in (0, 5),
    ),
)
def test_a_round_that_fits_without_drafts_ends_nobody(drafter: str, overlaps: bool, make_pair: MakePair) -> None:
    pair = make_pair(drafter, overlaps=overlaps)
    every = seeded(SCORED)
    expected, too_large = peak_of(pair, every)
    _, fitting = peak_of(pair, [params(**{**as_dict(each), "draft_steps": 0}) for each in every])
    assert too_large > 1.5 * fitting
    check(run_within((fitting + too_large) // 2, pair, every), expected, [])


@pytest.mark.parametrize("drafter", thinned(["eagle", "mtp3-deepseek"], lambda i, _: i == 0))
def test_the_drafts_go_before_the_fewest_sequences(drafter: str, make_pair: MakePair) -> None:
    pair = make_pair(drafter)
    every = seeded(SCORED)
    expected, _ = peak_of(pair, every)
    plain = [params(**{**as_dict(each), "draft_steps": 0}) for each in every]
    (_, fitting), (_, too_large) = (peak_of(pair, plain[:count]) for count in (5, 6))
    check(run_within((fitting + too_large) // 2, pair, every), expected, [5, 6, 7])


def test_what_is_cached_after_a_round_without_memory_has_no_hole_in_the_draft_kv(make_pair: MakePair) -> None:
    """Sequences that lost the drafter's state never draft again, and give no page of theirs to the cache."""
    pair = make_pair("eagle")
    every = seeded(SCORED)
    _, too_large = peak_of(pair, every)
    missed: list[int] = []
    finish = pair.decode.scheduler._on_finish
    assert finish is not None
    pair.decode.scheduler._on_finish = lambda sequence: (missed.append(sequence.num_missed), finish(sequence))[1]
    run_within(too_large // 2, pair, every)
    assert len(missed) == NUM_REQUESTS + 1 and all(count > MAX_MISSED for count in missed[:-1])
    assert pair.decode.cache.ledger().cache_referenced == 0


@pytest.mark.parametrize("overlaps", thinned([False, True], lambda i, _: i == 1))
def test_the_largest_local_prompt_ends_and_the_others_are_computed_again(overlaps: bool, make_pair: MakePair) -> None:
    """The first rounds may share the forward of the chunk. If the device has no memory for both, it computes the chunk
    alone."""
    pair = make_pair(overlaps=overlaps)
    scheduler = pair.decode.scheduler
    every_size, scheduler.mixed = scheduler.mixed, MixedSizes(())
    lens = [9, 24, 5]

    def serve(memory: MemoryLimit) -> tuple[list[Result], list[list[int]]]:
        rows: list[list[int]] = []
        executor = pair.decode.executor
        pair.decode.cache.flush()
        names = [f"{len(pair.results)} {number}" for number in range(len(lens))]
        with memory.around(executor, "submit"):
            submit = executor.submit

            def noting(work: RoundWork) -> None:
                if isinstance(work, Recompute):
                    rows.append([len(row.input_ids) for row in work.rows])
                submit(work)

            executor.submit = noting  # type: ignore[method-assign]
            for number, num_tokens in enumerate(lens):
                pair.submit(names[number], prompt(number, num_tokens), PLAIN, is_local=True)
            start_together(pair)
            pair.run()
            executor.submit = submit  # type: ignore[method-assign]
        return [pair.results[name, 0] for name in names], rows

    memory = MemoryLimit()
    expected, rows = serve(memory)
    assert rows == [[8, 23, 4]]
    for mixed in (scheduler.mixed, every_size):
        scheduler.mixed = mixed
        limited = MemoryLimit(memory.peak * 9 // 10)
        results, rows = serve(limited)
        is_joined = mixed is every_size
        assert rows == ([] if is_joined else [[8, 23, 4], [8, 4]]) and limited.num_failures == (2 if is_joined else 1)
        assert results[1].failed is not None and "no memory left for 35 tokens of prompts" in results[1].failed.message
        assert [results[number].ids for number in (0, 2)] == [expected[number].ids for number in (0, 2)]
    pair.check_books()


@pytest.mark.parametrize("overlaps", thinned([False, True], lambda i, _: i == 0))
def test_a_local_prompt_without_memory_beside_a_round_ends_and_the_round_goes_on(
    overlaps: bool, make_pair: MakePair
) -> None:
    """Beside the round, and alone after it, the prompt finds no memory. A shorter one then finds it."""
    pair = make_pair(overlaps=overlaps)
    expected, peak = peak_of(pair, [PLAIN] * 2)
    memory = MemoryLimit(peak * 3)
    names = [f"{len(pair.results)} {number}" for number in range(2)]
    pair.decode.cache.flush()
    with memory.around(pair.decode.executor, "submit"):
        for number, name in enumerate(names):
            pair.submit(name, prompt(number), PLAIN)
        pair.step_until(lambda: len(pair.decode.scheduler.running) == 2)
        pair.submit("long", prompt(2, 38), PLAIN, is_local=True)
        pair.submit("short", prompt(3, 6), PLAIN, is_local=True)
        pair.run()
    failed = pair.results["long", 0].failed
    assert failed is not None and (failed.code, failed.retryable) == ("out_of_memory", True)
    assert "tokens of prompts" in failed.message and memory.num_failures > 0
    assert [pair.results[name, 0].ids for name in names] == [each.ids for each in expected]
    assert len(pair.results["short", 0].ids) == NUM_TOKENS
    pair.check_books()


def test_a_chunk_counts_as_computed_only_if_it_was(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter finds no memory to catch up, so the round and the chunk beside it are not submitted."""
    pair = make_pair("eagle")
    long = prompt(2, 38)
    pair.submit("alone", long, PLAIN, is_local=True)
    pair.run()
    pair.decode.cache.flush()
    pair.submit("stream", prompt(0), PLAIN)
    pair.step_until(lambda: len(pair.decode.scheduler.running) == 1)
    failed: list[int] = []

    def no_memory(*_: object) -> None:
        if not failed and any(plan.sequences for plan in plans[-1:]):
            failed.append(pair.decode.scheduler.num_queued_tokens)
            raise OutOfMemory("no memory to catch up")

    plans: list[Any] = []
    submit = pair.decode._submit_round
    monkeypatch.setattr(pair.decode, "_submit_round", lambda plan, *rest: (plans.append(plan), submit(plan, *rest))[1])
    monkeypatch.setattr(pair.decode.rounds, "catch_up", no_memory)
    pair.submit("local", long, PLAIN, is_local=True)
    pair.step_until(lambda: bool(failed))
    assert pair.decode.scheduler.num_queued_tokens >= failed[0], "the tokens are still to compute"
    pair.run()
    assert pair.results["local", 0].ids == pair.results["alone", 0].ids
    pair.check_books()


def test_the_limit_counts_what_is_alive(make_pair: MakePair) -> None:
    """Rounds of one size take the same memory, whatever came before; larger ones take more."""
    pair = make_pair()
    memory = MemoryLimit()
    peaks: dict[int, set[int]] = {}
    executor = pair.decode.executor
    with memory.around(executor, "submit"):
        submit = executor.submit

        def noting(work: RoundWork) -> None:
            memory.peak = 0
            submit(work)
            if isinstance(work, Round):
                peaks.setdefault(len(work.slots), set()).add(memory.peak)

        executor.submit = noting  # type: ignore[method-assign]
        for count in (1, 4, 2, 4):
            run(pair, seeded(SCORED, count))
        executor.submit = submit  # type: ignore[method-assign]
    one, two, four = (peaks[count].pop() for count in (1, 2, 4))
    assert not any(peaks.values()), "the same peak in every round of a size"
    assert two == 2 * one and four == 4 * one > 4 * 2 * executor.vocab_size * 4, "scores and probabilities of each row"
    assert memory.num_bytes == 0
