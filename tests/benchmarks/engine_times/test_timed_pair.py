"""The modes that bench_speculation compares: no speculation, drafts in every round, adaptive drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from node_pair import params
from timed_pair import TimedPair

PROMPTS = [[at, at + 1] * 6 for at in (5, 9, 40)]
EACH = [params(16, temperature=0.0)] * 3


@pytest.fixture(params=["off", "fixed", "adaptive"])
def timed(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[tuple[str, TimedPair]]:
    settings: dict[str, Any] = {"speculative": "none" if request.param == "off" else "ngram", "threads": 1}
    settings |= {"page_size": 4, "draft_steps": None if request.param == "off" else 3}
    with closing(TimedPair(checkpoint("llama"), is_adaptive=request.param == "adaptive", **settings)) as pair:
        yield request.param, pair


def test_a_pair_drafts_as_its_kind_says(timed: tuple[str, TimedPair]) -> None:
    kind, pair = timed
    assert (pair.decode.pacing.chooser is not None) == (kind == "adaptive")
    assert (pair.prefill.cache.pool.page_size, pair.decode.executor.engine.pool.page_size) == (4, 4)
    run = pair.generate(PROMPTS, EACH, 2)
    assert [len(output) for output in run.outputs] == [16] * 3 and run.num_tokens == 45
    assert pair.num_steps == (0 if kind == "off" else 3)
    assert run.steps[0] == (3 if kind == "fixed" else 0)
    if kind == "adaptive":
        assert 0 < max(run.steps) <= 3, "it tries drafts, as many as the times of this machine say"
    else:
        assert max(run.steps) == pair.num_steps
    again = pair.generate(PROMPTS, EACH, 2)
    assert again.outputs == run.outputs and 0.0 < again.seconds < 60.0
    caches = [node.cache.ledger() for node in (pair.prefill, pair.decode)]
    assert [each.free + each.padding == 1536 for each in caches] == [False, True]  # decode keeps none
