"""S8: a row stands at its position. Rows of pools beside that of KV, shifted by one token, with that of a rejected
draft left in, or with one wrong number on the wire, are caught: index keys of a model with sparse attention, and keys
and values that have pools by window and by width."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from node_pair import node_pairs, params
from scratch import check_against_scratch
from solo import Solo, caught, coach
from thinned import thinned
from ties import Reference
from torch import Tensor

from baton.engine.attention import attention
from baton.engine.checkpoint.read_config import read_model_config
from baton.kernels.attention.attention import AttentionPlan
from baton.kernels.attention.picks import Sight
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.wire.request import Unit

NAME = "mtp-of-glm-dsa"
BY_WINDOW = ("mtp-of-mimo", "eagle-on-gemma4")
# a drafter's target, and the width of the rows: MiMo's values are 16 numbers wide, so are Gemma 4's heads with a window
WIDTHS = thinned([(name, width) for name in BY_WINDOW for width in (16, 24)], lambda i, *_: i == 0)
PROMPT = random.Random(8).choices(range(1, 512), k=45)  # a fifth of them is attended to
NUM_TOKENS = 16


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


def texts(model: Path) -> list[int]:
    """Return the text of a pair of nodes that drafts, some of whose drafts are accepted."""
    with node_pairs() as start:
        both = {"page_size": 4, "num_pages": 100, "chunk_tokens": 16, **settings(NAME, model, Path(), steps=3)}
        pair = start(model, prefill=both, decode=both)
        pair.submit("a", PROMPT, params(NUM_TOKENS))
        result = pair.run()["a", 0]
        assert result.failed is None, result.failed
        return result.ids


def check_text(model: Path, ids: list[int]) -> None:
    assert len(ids) == NUM_TOKENS
    Reference(model).assert_text(PROMPT, ids)


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


@pytest.mark.parametrize("num_new", thinned([4, 3], lambda i, _: i == 0))
def test_a_key_of_a_rejected_draft_that_stays_is_caught(num_new: int, model: Path, tmp_path: Path) -> None:
    """The defect: the first token of a round, which takes the place of a rejected draft, does not write its key."""
    solo = Solo(model, **settings(NAME, model, tmp_path, steps=3))

    def skip(sight: Sight, slots: torch.Tensor) -> torch.Tensor:
        return torch.cat([slots[1:2], slots[1:]]) if len(slots) == num_new else slots  # the second is written twice

    with rows_as(skip), caught():
        check_rounds(solo)


@contextmanager
def stored_as(width: int, change: Callable[[Tensor, AttentionPlan], tuple[Tensor, AttentionPlan]]) -> Iterator[None]:
    """Let new rows of `width` numbers be stored as `change(rows, plan)` returns them."""
    store = attention.store_kv

    def changed(rows: Tensor, layer: Tensor, plan: AttentionPlan) -> None:
        if layer.shape[-1] == width:
            rows, plan = change(rows, plan)
        store(rows, layer, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "store_kv", changed)
        yield


@pytest.mark.parametrize(("name", "width"), WIDTHS)
def test_rows_of_each_pool_one_token_off_are_caught(
    name: str, width: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The defect: rows of a prompt lie one slot too late."""
    model = target_of(name, checkpoint)
    solo = Solo(model, **settings(name, model, tmp_path, steps=3))
    check_against_scratch(solo, solo.start(PROMPT, params(9)))
    with stored_as(width, lambda rows, plan: (rows.roll(1, 0) if len(rows) > 16 else rows, plan)):
        sequence = solo.start(PROMPT, params(9))
    with caught():
        check_against_scratch(solo, sequence)


@pytest.mark.parametrize("width", thinned([16, 24], lambda i, _: i == 0))
def test_a_row_of_a_rejected_draft_that_stays_is_caught_in_each_pool(
    width: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The defect: the first token of a round does not write its row."""
    model = target_of("mtp-of-mimo", checkpoint)
    solo = Solo(model, **settings("mtp-of-mimo", model, tmp_path, steps=3))
    accepted = check_rounds(solo)
    assert min(accepted) < 3 and sum(accepted) > 0, accepted

    def skip(rows: Tensor, plan: AttentionPlan) -> tuple[Tensor, AttentionPlan]:
        return (rows[1:], replace(plan, store=plan.store[rows.shape[1] :])) if len(rows) == 4 else (rows, plan)

    with stored_as(width, skip), caught():
        check_rounds(solo)


# a drafter's target, the pool that is damaged, and whether the damage goes by
WIRE = [(NAME, 1, False), (NAME, 1, True)]
WIRE += [(name, pool, False) for name, num in (("mtp-of-mimo", 4), ("eagle-on-gemma4", 2)) for pool in range(num)]


@pytest.mark.parametrize(("name", "pool", "is_in_passing"), thinned(WIRE, lambda i, *_: i in (1, 5)))
def test_one_wrong_number_on_the_wire_is_found(
    name: str, pool: int, is_in_passing: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of a row changes behind its page's checksum. If it stays so, the request ends with an error that names
    the page. If another pull finds it right, the text is served."""
    model = target_of(name, checkpoint)
    offer, flipped = HandoffServer.offer, []
    with node_pairs() as start:
        both = {"page_size": 4, "num_pages": 100, "chunk_tokens": 64}
        pair = start(model, prefill=both, decode=both)
        memory, num_layers = pair.prefill.prompts.engine.memory[pool], read_model_config(model).num_layers
        assert 0 < len(memory.pages) < num_layers  # layers of another kind, or that share picks, have no rows in it

        def flip(page: int) -> None:
            memory.pages[-1, page - memory.first, 77] ^= 0x10

        def offered(self: HandoffServer, unit: Unit, indices: Any, pages: Any, *rest: Any) -> None:
            offer(self, unit, indices, pages, *rest)
            if not flipped and (held := [page for page in pages if memory.holds(page)]):
                flipped.append(held[0])
                flip(held[0])

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
