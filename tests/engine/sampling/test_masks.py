"""Masks of a round: each sequence's own rows, whatever slots held before, and padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from grammars import EOS, OBJECT, WORDS, allowed
from node_pair import params

from baton.engine.sampling.grammar import Grammars, RoundMasks
from baton.engine.sampling.state import SamplingState
from baton.metadata.wire.request import SamplingParams

VOCAB = 512
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture
def masks(model: Path) -> RoundMasks:
    return RoundMasks(Grammars(model, VOCAB, [EOS]), pinned=False)


def state(asked: SamplingParams, ids: Sequence[int] = ()) -> SamplingState:
    return SamplingState(asked, PROMPT, ids, vocab_size=VOCAB)


def legal(model: Path, asked: SamplingParams, count: int) -> list[int]:
    """Return tokens that a grammar allows: always the largest."""
    ids: list[int] = []
    for _ in range(count):
        word = allowed(model, asked, [*ids, 0], VOCAB)[-1]
        bits = (word.unsqueeze(1) >> torch.arange(32)) & 1
        ids.append(int(bits.flatten().nonzero().max()))
    return ids


@pytest.mark.parametrize("is_tree", [False, True])
def test_each_sequence_has_rows_of_its_own(is_tree: bool, model: Path, masks: RoundMasks) -> None:
    """One without a grammar may have every token, as padding may."""
    asked = [params(9, grammar=OBJECT), params(9), params(9, grammar=WORDS)]
    texts = [legal(model, asked[0], 5), [1, 2, 3, 4, 5], legal(model, asked[2], 4)]
    slots = [4, 0, 7]
    for slot, each, ids in zip(slots, asked, texts, strict=True):
        masks.load(slot, state(each, ids[:1]))
    drafts = torch.tensor([[*texts[0][1:3]], [8, 9], [*texts[2][1:3]], [0, 0]])  # the last row is padding
    parents = torch.tensor([[0, 1]] * 4) if is_tree else None
    found = masks.fill(masks.of(slots), drafts, parents).view(4, 3, -1)
    for row in (0, 2):
        assert torch.equal(found[row], allowed(model, asked[row], texts[row][:4], VOCAB)[1:])
    assert (found[[1, 3]] == -1).all()


def test_a_slot_forgets_the_sequence_before(model: Path, masks: RoundMasks) -> None:
    """A round that is under way keeps the matchers of its own sequences."""
    first, second = params(9, grammar=OBJECT), params(9, grammar=WORDS)
    masks.load(2, state(first))
    before = masks.of([2])
    masks.load(2, state(second))
    none = torch.empty(1, 0, dtype=torch.int64)
    assert torch.equal(masks.fill(masks.of([2]), none, None), allowed(model, second, [0], VOCAB))
    assert torch.equal(masks.fill(before, none, None), allowed(model, first, [0], VOCAB))
    masks.load(2, state(params(9)))
    assert masks.of([2]) == [None]
