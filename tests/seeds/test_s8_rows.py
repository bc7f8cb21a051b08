"""S8: a row stands at its position. Index keys of a model with sparse attention, shifted by one token, with that of a
rejected draft left in, or with one wrong number on the wire, are caught."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from node_pair import node_pairs, params
from scratch import check_against_scratch
from solo import Solo, caught, coach
from ties import Reference

from baton.kernels.attention.picks import Sight
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.wire.request import Unit

NAME = "mtp-of-glm-dsa"
PROMPT = [random.Random(8).randrange(1, 512) for _ in range(45)]  # a fifth of them is attended to
NUM_TOKENS = 24


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return target_of(NAME, checkpoint)


@contextmanager
def rows_as(change: Callable[[Sight, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let index keys be stored at changed rows: `change(sight, slots)` returns the slots [num_tokens]."""
    rows = Sight.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sight, "rows", lambda self, size: rows(self._replace(slots=change(self, self.slots)), size))
        yield


def texts(model: Path, *, is_local: bool = False) -> list[int]:
    """Return the text of a pair of nodes that drafts, some of whose drafts are accepted."""
    with node_pairs() as start:
        both = {"page_size": 4, "num_pages": 100, "chunk_tokens": 16, **settings(NAME, model, Path(), steps=3)}
        pair = start(model, prefill=both, decode=both)
        pair.submit("a", PROMPT, params(NUM_TOKENS), is_local=is_local)
        result = pair.run()["a", 0]
        assert result.failed is None, result.failed
        return result.ids


def check_text(model: Path, ids: list[int]) -> None:
    reference = Reference(model)
    reference.assert_greedy(PROMPT, ids, reference.generate(PROMPT, NUM_TOKENS))


def test_keys_at_their_positions_give_the_text_of_transformers(model: Path) -> None:
    check_text(model, texts(model))


@pytest.mark.parametrize("of", ["prompts", "rounds"])
def test_keys_one_token_off_are_caught(of: str, model: Path) -> None:
    """The defect: keys of prompts, which are handed over, or those of rounds lie one slot too late."""

    def shift(sight: Sight, slots: torch.Tensor) -> torch.Tensor:
        is_prompt = len(slots) > 4
        last = sight.block_table.shape[1] * 4 - 1
        return (slots + 1).clamp(max=last) if is_prompt == (of == "prompts") else slots

    with rows_as(shift):
        ids = texts(model)
    with caught():
        check_text(model, ids)


def check_rounds(solo: Solo) -> list[int]:
    """Check all pools against a recompute after each of some rounds. Return how many drafts each round accepted."""
    truth = PROMPT + solo.run(solo.start(PROMPT, params(40)), 36, 0)
    with pytest.MonkeyPatch.context() as patch:
        coach(patch, {0: truth}, lambda _, position: position % 7 not in (2, 3))
        sequence = solo.start(PROMPT, params(40))
        for num_steps in (3, 2, 3, 1, 3):
            solo.round([sequence], num_steps)
            check_against_scratch(solo, sequence)
    return sequence.num_accepted


def test_a_key_of_a_rejected_draft_is_written_again(model: Path, tmp_path: Path) -> None:
    accepted = check_rounds(Solo(model, **settings(NAME, model, tmp_path, steps=3)))
    assert min(accepted) < 3 and sum(accepted) > 0, accepted


@pytest.mark.parametrize("num_new", [4, 3])
def test_a_key_of_a_rejected_draft_that_stays_is_caught(num_new: int, model: Path, tmp_path: Path) -> None:
    """The defect: the first token of a round, which takes the place of a rejected draft, does not write its key."""
    solo = Solo(model, **settings(NAME, model, tmp_path, steps=3))

    def skip(sight: Sight, slots: torch.Tensor) -> torch.Tensor:
        return torch.cat([slots[1:2], slots[1:]]) if len(slots) == num_new else slots  # the second is written twice

    with rows_as(skip), caught():
        check_rounds(solo)


@pytest.mark.parametrize("is_in_passing", [False, True])
def test_one_wrong_number_on_the_wire_is_found(
    is_in_passing: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of an index key changes behind its page's checksum. If it stays so, the request ends with an error that
    names the page. If another pull finds it right, the text is served."""
    offer, flipped = HandoffServer.offer, []
    with node_pairs() as start:
        both = {"page_size": 4, "num_pages": 100, "chunk_tokens": 64}
        pair = start(model, prefill=both, decode=both)
        target, index, *_ = pair.prefill.prompts.engine.memory
        assert index.pages.shape[0] == 2 < target.pages.shape[0]  # layers that share picks have no keys

        def flip(page: int) -> None:
            index.pages[1, page, 77] ^= 0x10

        def offered(self: HandoffServer, unit: Unit, indices: Any, pages: Any, *rest: Any) -> None:
            offer(self, unit, indices, pages, *rest)
            if not flipped and len(pages):
                flipped.append(pages[0])
                flip(pages[0])

        monkeypatch.setattr(HandoffServer, "offer", offered)
        pair.submit("a", PROMPT, params(NUM_TOKENS))
        if is_in_passing:
            pair.step_until(lambda: pair.decode.handoff.num_checksum_failures)
            flip(flipped[0])
        result = pair.run()["a", 0]
    assert flipped
    if is_in_passing:
        check_text(model, result.ids)
    else:
        assert result.failed is not None and "checksum" in str(result.failed), result
