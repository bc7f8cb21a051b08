"""A step's plan becomes work for the device. A prompt split into chunks gives what the whole prompt gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts
from baton.metadata.errors import OutOfMemory
from baton.prefill_node import prompt_ends
from baton.prefill_node.chunk_work import ChunkUnderWay, submit
from baton.prefill_node.request import Request
from baton.prefill_node.scheduler import PrefillScheduler

from .conftest import MakeRequest


def compute(engine: Engine, requests: Sequence[Request], chunk_tokens: int) -> list[ChunkUnderWay]:
    """Compute the requests to their ends, and free their pages."""
    prompts, scheduler = Prompts(engine), PrefillScheduler(engine.cache, 16, chunk_tokens)
    submitted: list[ChunkUnderWay] = []
    for request in requests:
        scheduler.submit(request)
    assert scheduler.start() == requests
    while plan := scheduler.plan():
        submitted.append(submit(prompts, plan))
        for request, _ in plan:
            if request.is_submitted:
                scheduler.hand_over(request)
    for request in requests:
        scheduler.remove(request)
    engine.cache.flush()
    return submitted


def first_tokens(submitted: list[ChunkUnderWay]) -> list[Any]:
    return [first.token_ids for each in submitted for tails in each.submitted.tails for first in tails.first_tokens()]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 5])
@pytest.mark.parametrize("received", [0, 3])
def test_chunks_equal_the_whole_prompt(
    received: int, chunk_tokens: int, engine: Engine, make_request: MakeRequest
) -> None:
    """Every token of the prompt but the first has a score. Tokens of an earlier attempt have none."""

    def run(num_tokens: int) -> tuple[list[Any], list[float], list[ChunkUnderWay]]:
        request = make_request("r", 14, n=2, received=received, prompt_logprobs=True)
        submitted = compute(engine, [request], num_tokens)
        scores = [entry.logprob for each in submitted for row in each.submitted.wait().logprobs for entry in row]
        return first_tokens(submitted), scores, submitted

    whole_tokens, whole_scores, _ = run(64)
    tokens, scores, submitted = run(chunk_tokens)
    assert len(submitted) == -(-14 // chunk_tokens)
    assert tokens == whole_tokens and len(scores) == 13 - received
    assert scores == pytest.approx(whole_scores, abs=1e-4)


def test_the_work_names_prompts_by_their_keys(engine: Engine, make_request: MakeRequest) -> None:
    requests = [make_request("a", 3), make_request("bb", 7, n=2), make_request("ccc", 9)]
    chunk = compute(engine, requests, 12)[0].submitted.chunk
    assert [row.key for row in chunk.rows] == [request.key for request in requests]
    assert [row.token_ids for row in chunk.rows] == [request.token_ids for request in requests]
    assert [list(row.row.input_ids) for row in chunk.rows] == [
        request.token_ids[:num] for request, num in zip(requests, (3, 7, 2), strict=True)
    ]
    assert chunk.num_tokens == 12 and [row.row.num_scored for row in chunk.rows] == [0, 0, 0]
    assert [(tail.row, len(tail.states)) for tails in chunk.tails for tail in tails.tails] == [(0, 1), (1, 2)]


def test_prompts_with_many_choices_are_sampled_in_several_batches(
    engine: Engine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[ChunkUnderWay]:
        return compute(engine, [make_request("r" * n, 3 + n, n=n) for n in (1, 2, 3, 4)], 64)

    (together,) = run()
    monkeypatch.setattr(prompt_ends, "_MAX_CHOICES", 3)
    (apart,) = run()
    assert [[len(end.units) for end in ends] for ends in together.ends] == [[1, 2, 3, 4]]
    assert [[len(end.units) for end in ends] for ends in apart.ends] == [[1, 2], [3], [4]]
    assert first_tokens([apart]) == first_tokens([together])


def test_a_chunk_without_memory_changes_no_request(
    engine: Engine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 376 MiB")

    scheduler, request = PrefillScheduler(engine.cache, 16, 5), make_request("r", 9)
    scheduler.submit(request)
    scheduler.start()
    plan = scheduler.plan()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward_with_aux", fail)
        with pytest.raises(OutOfMemory, match="no memory left for 5 prompt tokens"):
            submit(Prompts(engine), plan)
    assert request.num_submitted == 0 and scheduler.plan() == plan
    assert submit(Prompts(engine), plan).submitted.chunk.num_tokens == request.num_submitted == 5
    scheduler.remove(request)
