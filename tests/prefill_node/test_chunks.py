"""Chunks: a prompt split into chunks gives the logits and scores of the whole prompt, and ends are batched."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.engine import Engine
from baton.prefill_node import chunks
from baton.prefill_node.chunks import SubmittedChunk, submit
from baton.prefill_node.scheduler import PrefillScheduler

from .conftest import MakeRequest


def compute(engine: Engine, requests: list[Any], chunk_tokens: int) -> list[SubmittedChunk]:
    """Compute the requests to their ends, and free their pages."""
    scheduler, submitted = PrefillScheduler(engine.cache, 16, chunk_tokens), list[SubmittedChunk]()
    for request in requests:
        scheduler.submit(request)
    assert scheduler.start() == requests
    while plan := scheduler.plan():
        submitted.append(submit(engine, plan))
        for request, _ in plan:
            if request.is_submitted:
                scheduler.hand_over(request)
    for request in requests:
        scheduler.remove(request)
    engine.cache.flush()
    return submitted


def first_tokens(submitted: list[SubmittedChunk]) -> list[Any]:
    return [sample.token_ids for chunk in submitted for ends in chunk.ends for sample in ends.tokens()]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 5])
def test_chunks_equal_the_whole_prompt(chunk_tokens: int, engine: Engine, make_request: MakeRequest) -> None:
    def run(num_tokens: int) -> tuple[list[Any], list[float], list[SubmittedChunk]]:
        submitted = compute(engine, [make_request("r", 14, n=2, prompt_logprobs=True)], num_tokens)
        scores = [entry.logprob for chunk in submitted for part in chunk.scores for entry in part.read()]
        return first_tokens(submitted), scores, submitted

    whole_tokens, whole_scores, _ = run(64)
    tokens, scores, submitted = run(chunk_tokens)
    assert len(submitted) == -(-14 // chunk_tokens)
    assert tokens == whole_tokens and len(scores) == 13
    assert scores == pytest.approx(whole_scores, abs=1e-4)


def test_a_chunk_on_the_cpu_is_computed_when_it_is_submitted(engine: Engine, make_request: MakeRequest) -> None:
    (chunk,) = compute(engine, [make_request("r", 5)], 64)
    assert chunk.event is None and chunk.wait() == chunk.submitted >= chunk.begun
    assert not chunk.is_done, "no device says so"


def test_prompts_with_many_choices_are_sampled_in_several_batches(
    engine: Engine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[SubmittedChunk]:
        return compute(engine, [make_request("r" * n, 3 + n, n=n) for n in (1, 2, 3, 4)], 64)

    (together,) = run()
    monkeypatch.setattr(chunks, "_MAX_CHOICES", 3)
    (apart,) = run()
    assert [[len(end.units) for end in ends.ends] for ends in together.ends] == [[1, 2, 3, 4]]
    assert [[len(end.units) for end in ends.ends] for ends in apart.ends] == [[1, 2], [3], [4]]
    assert first_tokens([apart]) == first_tokens([together])
