"""The state of each position scores the token after it, for the rows of a forward that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.decode_node.config import DecodeConfig
from baton.engine.engine import Engine
from baton.engine.prompts.prompts import SubmittedScores
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow

PAGE_SIZE = 4


@pytest.fixture
def engine(checkpoint: Callable[..., Path]) -> Engine:
    model = str(checkpoint("llama"))
    return Engine(DecodeConfig(model=model, device="cpu", threads=1, page_size=PAGE_SIZE, num_pages=32))


def test_rows_are_scored_as_far_as_they_ask_for_it(engine: Engine) -> None:
    """The second of three rows begins in the middle of its prompt and scores two of its three tokens."""
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [3, 2, 1]]
    pages = [engine.pool.allocate(2, Owner.REQUEST) for _ in prompts]
    with torch.inference_mode():
        engine.compute([BatchRow([4, 5], 0, pages[1])])
        rows = [
            BatchRow([1, 2], 0, pages[0]),
            BatchRow([6, 7, 8], 2, pages[1], 3, num_scored=2),
            BatchRow([3, 2], 0, pages[2], 2, num_scored=2),
        ]
        computed = engine.compute(rows)
        found = SubmittedScores.of(engine, rows, prompts, [5, 3, 0], computed.final).read()
    assert [len(each) for each in found] == [0, 2, 2]
    expected = computed.logits.log_softmax(-1)[1:]  # the first row has one row of logits
    for entry, token, scores in zip([*found[1], *found[2]], [7, 8, 2, 1], expected[[0, 1, 3, 4]], strict=True):
        assert entry.logprob == pytest.approx(float(scores[token]), abs=1e-5)
    assert [entry.top_ids for entry in found[1]] == [tuple(each.topk(3).indices.tolist()) for each in expected[:2]]
    assert [entry.top_ids for entry in found[2]] == [(), ()]


def test_states_of_scored_tokens_must_be_kept(engine: Engine) -> None:
    with pytest.raises(AssertionError, match="states of scored tokens were not kept"):
        SubmittedScores.of(engine, [BatchRow([1], 0, [1], num_scored=1)], [[1, 2]], [0], None)
