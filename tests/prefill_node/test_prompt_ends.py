"""Prompts that end in one step are sampled and drafted together, with the same results as each alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import ALGORITHM, write_head
from node_pair import NodePair, Result, node_pairs, params

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
    """Submit unlike requests: with one or more choices, greedy or seeded, some ended by the first token. `again` is
    appended to their names."""
    for name in names:
        index = ord(name) - ord("a")
        rng = random.Random(index)
        prompt = [rng.randrange(50) for _ in range(5 + 3 * index)]
        more = {"seed": index, **SAMPLED} if index % 2 else {}
        pair.submit(name + again, prompt, params(1 if index == 2 else 8, **more), n=1 + index % 3)


def together(pair: NodePair, num_prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay computing until one step can compute so many prompts."""
    scheduler, plan = pair.prefill.scheduler, pair.prefill.scheduler.plan
    monkeypatch.setattr(scheduler, "plan", lambda: plan() if len(scheduler.computing) >= num_prompts else [])


def by_name(results: dict[tuple[str, int], Result]) -> dict[tuple[str, int], Any]:
    return {
        (rid[0], choice): (each.ids, [entry.top_ids for entry in each.logprobs])
        for (rid, choice), each in results.items()
    }


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
    engine = pair.prefill.prompts.engine
    logits = engine.model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        found[1, 7] = float("nan")
        return found

    monkeypatch.setattr(engine.model, "logits", broken)
    submit(pair, names, " again")
    results = pair.run()
    bad = {(rid[0], choice): each for (rid, choice), each in results.items() if each.failed is not None}
    assert set(bad) == {("b", 0), ("b", 1)} and not any(result.ids for result in bad.values())
    assert all(each.failed is not None and each.failed.code == "model_error" for each in bad.values())
    assert by_name(results) == good | {key: ([], []) for key in bad}
