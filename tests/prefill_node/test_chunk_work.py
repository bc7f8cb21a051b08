"""A step's plan becomes work for the device. A prompt split into chunks gives what the whole prompt gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import ALGORITHM, write_head
from node_pair import NodePair, Result, node_pairs, params

from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts
from baton.metadata.errors import OutOfMemory
from baton.prefill_node import chunk_work
from baton.prefill_node.chunk_work import ChunkUnderWay, PromptEnd, batches, submit, tails
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
    monkeypatch.setattr(chunk_work, "_MAX_CHOICES", 3)
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


SAMPLED = {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "num_logprobs": 2}


@pytest.fixture
def make_pair(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., NodePair]]:
    with node_pairs() as start:

        def make(speculative: str = "none", **prefill: Any) -> NodePair:
            model, settings = checkpoint("llama"), {"page_size": 4}
            if speculative != "none":
                head = write_head(tmp_path / speculative, speculative, model)
                settings |= {"speculative": ALGORITHM[speculative], "draft_model": str(head), "draft_steps": 3}
            return start(model, prefill=settings | prefill, decode=settings)

        yield make


def submit_prompts(pair: NodePair, names: str, again: str = "") -> None:
    """Submit different requests: with one or more choices, greedy or seeded, some ended by the first token. `again` is
    appended to their names."""
    for name in names:
        index = ord(name) - ord("a")
        rng = random.Random(index)
        prompt = [rng.randrange(50) for _ in range(5 + 3 * index)]
        more = {"seed": index, **SAMPLED} if index % 2 else {}
        pair.submit(name + again, prompt, params(1 if index == 2 else 8, **more), n=1 + index % 3)


def together(pair: NodePair, num_prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay computing until one step can compute this many prompts."""
    scheduler, plan = pair.prefill.scheduler, pair.prefill.scheduler.plan
    monkeypatch.setattr(scheduler, "plan", lambda: plan() if len(scheduler.computing) >= num_prompts else [])


def by_name(results: dict[tuple[str, int], Result]) -> dict[tuple[str, int], Any]:
    return {
        (rid[0], choice): (each.ids, [entry.top_ids for entry in each.logprobs])
        for (rid, choice), each in results.items()
    }


def test_every_choice_but_the_first_copies_the_pages_that_differ(engine: Engine, make_request: MakeRequest) -> None:
    request = make_request("r", 16, n=3)
    lease = engine.cache.acquire([], "", 0)
    request.start(lease, [1, 2, 3, 4], [11, 12, 21, 22], num_shared=2, num_cached=0)
    tail = PromptEnd.of(5, request).tail
    assert tail.row == 5 and tail.block_tables == [[1, 2, 3, 4], [1, 2, 11, 12], [1, 2, 21, 22]]
    assert (tail.copies.sources, tail.copies.targets) == ([3, 4, 3, 4], [11, 12, 21, 22])
    engine.cache.release(lease)


def test_only_a_prompt_with_open_tickets_is_handed_over(make_request: MakeRequest) -> None:
    request = make_request("r", 5, n=2)
    first, _ = request.choices
    assert not PromptEnd.of(0, request).tail.is_handed_over
    request.open_ticket(first)
    tail = PromptEnd.of(0, request).tail
    assert tail.is_handed_over and list(tail.states) == list(request.choices.values())
    assert list(tail.copies.sources) == []


def test_a_batch_holds_whole_prompts(make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.prefill_node.chunk_work._MAX_CHOICES", 4)
    ends = [PromptEnd.of(row, make_request("r", 5, n=n)) for row, n in enumerate((2, 2, 1, 9, 1))]
    found = batches(ends)
    assert [[end.row for end in batch] for batch in found] == [[0, 1], [2], [3], [4]]
    assert [tail.row for batch in found for tail in tails(batch).tails] == [0, 1, 2, 3, 4]
    assert batches([]) == []


@pytest.mark.parametrize("speculative", ["none", "eagle", "mtp3-deepseek"])
def test_prompts_that_end_in_one_step(
    speculative: str, make_pair: Callable[..., NodePair], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "abcdef"
    pair = make_pair(speculative, prefix_cache=False)
    for name in names:
        submit_prompts(pair, name)
        pair.run()
    alone, accepted = by_name(pair.results), pair.decode.rounds.stats.num_accepted
    pair.results.clear()
    together(pair, len(names), monkeypatch)
    submit_prompts(pair, names, " again")
    before = pair.prefill.stats().steps
    assert by_name(pair.run()) == alone
    assert pair.prefill.stats().steps == before + 1
    assert pair.decode.rounds.stats.num_accepted == 2 * accepted


@pytest.mark.parametrize("speculative", ["none", "mtp3-deepseek"])
def test_logits_that_are_nan_fail_only_their_prompt(
    speculative: str, make_pair: Callable[..., NodePair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six prompts in one step, the second one fails, with both its choices."""
    names = "abcdef"
    pair = make_pair(speculative, prefix_cache=False)
    submit_prompts(pair, names)
    good = by_name(pair.run())
    pair.results.clear()
    together(pair, len(names), monkeypatch)
    model = pair.prefill.prompts.engine.model
    logits = model.logits

    def broken(hidden: torch.Tensor, *lens: Any) -> torch.Tensor:
        found = logits(hidden, *lens)
        found[1, 7] = float("nan")
        return found

    monkeypatch.setattr(model, "logits", broken)
    submit_prompts(pair, names, " again")
    results = pair.run()
    bad = {(rid[0], choice): each for (rid, choice), each in results.items() if each.failed is not None}
    assert set(bad) == {("b", 0), ("b", 1)} and not any(result.ids for result in bad.values())
    assert all(each.failed is not None and each.failed.code == "model_error" for each in bad.values())
    assert by_name(results) == good | {key: ([], []) for key in bad}
