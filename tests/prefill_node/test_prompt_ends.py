"""Ends of prompts as work for the device. Prompts that end in one step give the same results as each alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import ALGORITHM, write_head
from node_pair import NodePair, Result, node_pairs, params

from baton.engine.engine import Engine
from baton.prefill_node.prompt_ends import PromptEnd, batches, tails

from .conftest import MakeRequest

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


def submit(pair: NodePair, names: str, again: str = "") -> None:
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
    monkeypatch.setattr("baton.prefill_node.prompt_ends._MAX_CHOICES", 4)
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
        submit(pair, name)
        pair.run()
    alone, accepted = by_name(pair.results), pair.decode.rounds.stats.num_accepted
    pair.results.clear()
    together(pair, len(names), monkeypatch)
    submit(pair, names, " again")
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
    submit(pair, names)
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
    submit(pair, names, " again")
    results = pair.run()
    bad = {(rid[0], choice): each for (rid, choice), each in results.items() if each.failed is not None}
    assert set(bad) == {("b", 0), ("b", 1)} and not any(result.ids for result in bad.values())
    assert all(each.failed is not None and each.failed.code == "model_error" for each in bad.values())
    assert by_name(results) == good | {key: ([], []) for key in bad}
