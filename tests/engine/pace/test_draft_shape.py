"""The arithmetic of draft shapes, against trees that are counted and against the slots that rounds write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafters import settings, target_of
from node_pair import params
from solo import Solo

from baton.engine.pace.draft_length import NO_DRAFTS, DraftShape

PROMPT = [17, 4, 250, 33, 99]


def count_candidates(num_steps: int, topk: int) -> int:
    """Count the nodes of a dynamic tree before it is pruned: each step gives `topk` nodes of the last one children."""
    count, frontier = 0, 1
    for _ in range(num_steps):
        children = frontier * topk
        count, frontier = count + children, min(children, topk)
    return count


@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_tree_has_the_candidates_that_its_growth_makes(num_steps: int, topk: int) -> None:
    assert DraftShape(num_steps, topk).max_drafts == count_candidates(num_steps, topk)


def test_a_chain_has_as_many_drafts_as_steps_and_a_tree_as_many_as_it_says() -> None:
    assert DraftShape(5).is_chain and DraftShape(5).num_drafts == 5
    assert not DraftShape(3, 2, 6).is_chain and DraftShape(3, 2, 6).num_drafts == 6
    assert NO_DRAFTS.is_chain and NO_DRAFTS.num_drafts == 0 and NO_DRAFTS.num_slots == 1


def test_a_chain_may_be_shortened() -> None:
    shape = DraftShape(3)
    assert [shape.with_steps(steps) for steps in shape.choices] == [DraftShape(steps) for steps in range(4)]


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    shape = DraftShape(3, 2, 6)
    assert [shape.with_steps(steps) for steps in shape.choices] == [NO_DRAFTS, shape]


@pytest.mark.parametrize(("shape", "steps"), [(DraftShape(3), 4), (DraftShape(3), -1), (DraftShape(3, 2, 6), 2)])
def test_steps_that_are_no_choice_are_our_bug(shape: DraftShape, steps: int) -> None:
    with pytest.raises(AssertionError):
        shape.with_steps(steps)


def slots_written(solo: Solo, num_steps: int) -> int:
    """Run one round of a sequence. Return the number of slots from the first without KV to the last that the round
    wrote, in any pool. A new page is cleared when its first slot is written, which does not count."""
    sequence = solo.start(PROMPT, params(60))
    first, page_size = sequence.num_computed, solo.engine.pool.page_size
    slots = [(page, slot) for page in sequence.pages for slot in range(page_size)][first:]
    for kv in solo.engine.kvs:
        for page, slot in slots:
            kv[:, page, :, :, slot] = 0.0
    solo.round([sequence], num_steps)
    written = [any(bool(kv[:, page, :, :, slot].any()) for kv in solo.engine.kvs) for page, slot in slots]
    return len(written) - written[::-1].index(True)


CHAINS = [("eagle", {"draft_steps": 1}), ("standalone", {"draft_steps": 4}), ("frozen-kv-mtp", {"draft_steps": 3})]
TREES = [
    ("eagle", {"draft_steps": 1, "draft_topk": 3}),
    ("frozen-kv-mtp", {"draft_steps": 3, "draft_topk": 2, "draft_tokens": 10}),
    ("eagle", {"draft_steps": 4, "draft_topk": 3, "draft_tokens": 5}),  # drafts more branches than it verifies
]


@pytest.mark.parametrize(("name", "asked"), CHAINS + TREES, ids=str)
def test_a_round_writes_no_slot_beyond_those_of_its_shape(
    name: str, asked: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Pages are promised for these slots. A chain, and a round without drafts, write all of them."""
    model = target_of(name, checkpoint)
    solo = Solo(model, num_slots=2, num_pages=80, **(settings(name, model, tmp_path) | asked))
    shape = solo.drafter.shape
    assert slots_written(solo, 0) == NO_DRAFTS.num_slots == 1
    found = slots_written(solo, shape.num_steps)
    assert found == shape.num_slots if shape.is_chain else shape.num_drafts < found <= shape.num_slots, (found, shape)
