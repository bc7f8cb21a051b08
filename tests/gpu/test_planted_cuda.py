"""Planted models in bfloat16 on CUDA: exactly the text that is known, by graphs and with a drafter; and KV that is not
the prompt's changes it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from node_pair import NodePair, params
from planted import PlantedModel, write_planted
from planted_eagle3 import write_planted_eagle3
from planted_models import random_prompt, small

LENGTHS = (5, 64, 190, 333, 700)
NUM_TOKENS = 80
ACCEPTANCE = 0.8


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlantedModel, Path]:
    directory = tmp_path_factory.mktemp("planted")
    model = write_planted(directory, small())
    write_planted_eagle3(directory / "eagle3", model, ACCEPTANCE)
    return model, directory


def make_pair(directory: Path, **more: Any) -> NodePair:
    both = {"device": "cuda", "page_size": 16, "num_pages": 400, "max_running": 8, "chunk_tokens": 96, **more}
    return NodePair(directory, prefill=both, decode=both)


@pytest.mark.parametrize("speculative", ["none", "eagle3"])
def test_output_is_the_planted_text(speculative: str, planted: tuple[PlantedModel, Path]) -> None:
    model, directory = planted
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    with closing(make_pair(directory, speculative=speculative)) as pair:
        for turn in ("cold", "hit", "preempted"):
            for index, prompt in enumerate(prompts):
                pair.submit(f"{turn} {index}", prompt, params(NUM_TOKENS))
            if turn == "preempted":
                pair.step_until(lambda: len(pair.decode.scheduler.running) > 2)
                pair.decode.settle()
                pair.decode.scheduler.preempt(pair.decode.scheduler.running[-1])
                pair.decode.cache.flush()
            results = pair.run()
            for index, prompt in enumerate(prompts):
                expected = model.text.continuation(prompt, NUM_TOKENS)
                assert results[f"{turn} {index}", 0].ids == expected, (turn, index)
        pair.check_books()
        assert pair.decode.stats().preemptions > 0
        stats = pair.decode.rounds.stats
    if speculative != "none":
        assert stats.num_drafted > 100
        first = stats.accepted_at[0] / stats.num_verified
        assert first == pytest.approx(ACCEPTANCE, abs=0.08), stats


def test_other_kv_gives_another_text(planted: tuple[PlantedModel, Path]) -> None:
    """What the exactness above is worth: eight pages of a running sequence give way to others, and its text changes."""
    model, directory = planted
    prompt = random_prompt(333, seed=1)
    with closing(make_pair(directory, speculative="none")) as pair:
        pair.submit("spoilt", prompt, params(NUM_TOKENS))
        pair.step_until(lambda: len(pair.decode.scheduler.running) == 1)
        pair.decode.settle()
        pages = pair.decode.scheduler.running[0].pages
        kv = pair.decode.executor.engine.kv
        kv[:, pages[2:10]] = kv[:, pages[10:18]].clone()
        results = pair.run()
        assert results["spoilt", 0].ids != model.text.continuation(prompt, NUM_TOKENS)
