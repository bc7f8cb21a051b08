"""Models whose layers all have windows: a decode node gives back the pages that none of them sees."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafters
import pytest
from node_pair import NodePair, node_pairs, params
from thinned import halved
from ties import Reference

from baton.engine.state.pages import Owner
from baton.engine.work import MAX_MISSED

PAGE_SIZE, WINDOW, NUM_NEW = 4, 9, 150
PROMPTS = [[5, 6, 7], random.Random(1).choices(range(1, 512), k=60), random.Random(2).choices(range(1, 512), k=41)]
# pages of what is seen and of what the drafter may catch up on, of two rounds, and of one begun page at each end
MOST_PAGES = (WINDOW + MAX_MISSED) // PAGE_SIZE + 2 * 5 // PAGE_SIZE + 3


def most_held(pair: NodePair) -> int:
    """Run all requests. Return the most pages of the decode node that they held, cached ones included, from the time on
    when all of them had been generating for long."""
    most, pool = 0, pair.decode.cache.pool
    while not pair.is_done:
        pair.step()
        running = list(pair.decode.scheduler.running)
        if len(running) == len(PROMPTS) and min(each.num_generated for each in running) > 100:
            num_cached = pair.decode.cache.ledger().cache_referenced
            most = max(most, num_cached + sum(pool.owner(page) == Owner.REQUEST for page in range(pool.num_pages)))
    assert most
    return most


@pytest.mark.parametrize(("drafter", "caches"), halved(["none", "ngram", "standalone"], [True, False]))
def test_pages_that_no_layer_sees_are_given_back(
    drafter: str, caches: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = checkpoint("mistral", sliding_window=WINDOW)
    both: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 300, "chunk_tokens": 16, "prefix_cache": caches}
    if drafter == "standalone":
        draft = drafters.perturbed(model, tmp_path / "draft", 0.1)
        both |= {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 3}
    elif drafter == "ngram":
        both |= {"speculative": "ngram", "draft_steps": 3}
    reference = Reference(model)
    with node_pairs() as start:
        pair = start(model, prefill=both, decode=both)
        for turn in range(2):  # the second finds what the first has left in the cache
            for index, ids in enumerate(PROMPTS):
                pair.submit(f"{turn} {index}", ids, params(NUM_NEW, seed=index))
            assert most_held(pair) <= len(PROMPTS) * MOST_PAGES
        for (rid, _), result in pair.results.items():
            ids = PROMPTS[int(rid[2:])]
            reference.assert_greedy(ids, result.ids, reference.generate(ids, NUM_NEW))
    assert reference.num_ties <= 1, reference.num_ties


def test_a_preempted_sequence_computes_all_again(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("mistral", sliding_window=WINDOW)
    both: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 300, "chunk_tokens": 16}
    reference = Reference(model)
    with node_pairs() as start:
        pair = start(model, prefill=both, decode=both)
        pair.submit("a", PROMPTS[1], params(NUM_NEW))
        pair.step_until(lambda: pair.decode.scheduler.running and pair.decode.scheduler.running[0].num_generated > 120)
        pair.decode.settle()
        [sequence] = pair.decode.scheduler.running
        assert sequence.first_kept > len(PROMPTS[1]) // PAGE_SIZE
        pair.decode.scheduler.preempt(sequence)
        ids = pair.run()["a", 0].ids
    reference.assert_greedy(PROMPTS[1], ids, reference.generate(PROMPTS[1], NUM_NEW))


def test_a_layer_that_sees_all_keeps_all(checkpoint: Callable[..., Path]) -> None:
    with node_pairs() as start:
        both: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 300}
        pair = start(checkpoint("gpt_oss"), prefill=both, decode=both)  # every other layer has a window
        assert pair.decode.executor.windows.widest is None
