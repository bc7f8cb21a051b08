"""S4: the state that a round passes on comes from its own result, for any batch and draft length.

Chains run by direct calls, with batches that grow, shrink and change their order. After every round, tokens and state
are compared with those of a recompute from scratch.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import ORDINARY, STREAM_MTP, settings, target_of
from node_pair import params
from scratch import Outsiders, check_against_scratch
from solo import Solo, caught, coach, plain_texts
from thinned import thinned

from baton.engine.drafters.base import DraftState, RoundRows
from baton.engine.rounds.rounds import Rounds
from baton.engine.rounds.slots import Slots
from baton.metadata.wire.request import SamplingParams

LENS = (7, 12, 3, 9)
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 0.7, "top_k": 40, "frequency_penalty": 0.2},
    {"temperature": 1.3, "logit_bias": {7: 2.0}, "presence_penalty": 0.3},
]
# Who takes part in a round, by index and in this order, and how many tokens it drafts.
ROUNDS = [
    ((0,), 1),
    ((0, 1), 5),
    ((2, 1, 0), 0),
    ((1, 2), 5),
    ((3, 0, 2), 1),
    ((3,), 5),
    ((2, 0, 3), 5),
    ((1, 3), 0),
    ((0, 1, 2), 3),
    ((1,), 2),
]

MakeSolo = Callable[..., Solo]


@pytest.fixture
def make_solo(checkpoint: Callable[..., Path], tmp_path: Path) -> MakeSolo:
    def make(name: str) -> Solo:
        model = target_of(name, checkpoint)
        texts(model)
        return Solo(model, **settings(name, model, tmp_path))

    return make


def asked(index: int) -> SamplingParams:
    return params(60, seed=index, **PARAMS[index])


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(512) for _ in range(num)] for num in LENS]


@functools.cache
def texts(model: Path) -> dict[int, list[int]]:
    """Return each prompt with the text after it, by seed. Call it first before a defect is put back."""
    return plain_texts(model, prompts(), asked, 45)


def is_told(seed: int, position: int) -> bool:
    """Return whether the drafter is told this token, so that rounds accept none, some or all of their drafts."""
    return (position + 3 * seed) % 7 not in (2, 3)


def check(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check after every round that each sequence has the tokens of no speculation and, once the drafter has seen all of
    them, the state of a recompute from scratch. Slots beyond the tokens are overwritten between rounds. Returns how
    many drafts each round accepted."""
    truths = texts(solo.engine.model_dir)
    coach(monkeypatch, truths, is_told)
    sequences = [solo.start(prompt, asked(index)) for index, prompt in enumerate(prompts())]
    for sequence in sequences:
        check_against_scratch(solo, sequence)
    for members, num_steps in ROUNDS:
        for sequence in sequences:
            solo.poison(sequence)
        outsiders = Outsiders(solo, [each for i, each in enumerate(sequences) if i not in members])
        solo.round([sequences[index] for index in members], min(num_steps, solo.drafter.shape.num_steps))
        outsiders.check()
        for index in members:
            assert sequences[index].token_ids == truths[index][: len(sequences[index].token_ids)], index
            check_against_scratch(solo, sequences[index])
    return [count for sequence in sequences for count in sequence.num_accepted]


@pytest.mark.parametrize(  # test_s4_buckets.py has the others
    "name",
    thinned(
        (*ORDINARY, STREAM_MTP),
        lambda _, name: name in ("eagle3", "mtp3-mimo"),
    ),
)
def test_state_is_that_of_a_recompute_after_every_round(
    name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo(name)
    accepted = check(solo, monkeypatch)
    assert {0, solo.drafter.shape.num_steps} < set(accepted), accepted  # none, all, and some


def kind_of(solo: Solo) -> Any:
    """Return the drafter's class, whose methods a test replaces by defective ones."""
    return type(solo.drafter)


@pytest.mark.parametrize("name", ["eagle3", "frozen-kv-mtp"])
def test_state_left_by_row_of_the_batch_is_caught(
    name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: states stay in the rows of the round, and the round of another batch overwrites them."""
    solo = make_solo(name)
    advance = Slots.advance

    def by_row(
        self: Slots, index: torch.Tensor, targets: Any, is_valid: Any, count: Any, draft: DraftState | None, needs: Any
    ) -> torch.Tensor:
        numbers = advance(self, index, targets, is_valid, count, None, needs)
        if draft is not None:
            self._draft.store(torch.arange(len(index)), draft)
        return numbers

    monkeypatch.setattr(Slots, "advance", by_row)
    with caught():
        check(solo, monkeypatch)


@pytest.mark.parametrize("name", ["eagle3", "frozen-kv-mtp"])
def test_state_of_the_last_row_is_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: the state is taken from the round's last row, which is right only if all drafts were accepted."""
    solo = make_solo(name)
    observe = kind_of(solo).observe

    def last(self: Any, rows: Any, hidden: Any, targets: torch.Tensor, num_accepted: torch.Tensor) -> DraftState:
        return observe(self, rows, hidden, targets, torch.full_like(num_accepted, targets.shape[1] - 1))

    monkeypatch.setattr(kind_of(solo), "observe", last)
    with caught():
        check(solo, monkeypatch)


@pytest.mark.parametrize("name", ["eagle3", "mtp3-mimo"])
def test_state_of_an_earlier_round_is_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: the next round that drafts uses the state from before the rounds without drafts."""
    solo = make_solo(name)

    def forget(self: Rounds, sequences: Any) -> None:
        for sequence in sequences:
            sequence.num_missed = 0

    monkeypatch.setattr(Rounds, "catch_up", forget)
    with caught():
        check(solo, monkeypatch)


def test_a_frozen_state_of_an_earlier_round_is_caught(make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: a drafter without KV keeps its state in a round without drafts."""
    solo = make_solo("frozen-kv-mtp")
    observe = kind_of(solo).observe

    def lazy(self: Any, rows: RoundRows, hidden: Any, targets: torch.Tensor, num_accepted: Any) -> DraftState:
        return rows.draft if targets.shape[1] == 1 else observe(self, rows, hidden, targets, num_accepted)

    monkeypatch.setattr(kind_of(solo), "observe", lazy)
    with caught():
        check(solo, monkeypatch)
