"""S4: what a round hands on is its own result, whichever sequences shared its batch and however many it drafted.

Covers chains run by direct calls, with batches that grow, shrink and change places.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import ALL, SHIFTED, settings, target_of
from node_pair import params
from solo import Running, Solo, caught, coach

from baton.engine.drafters import frozen_kv, shifted
from baton.engine.drafters.base import DraftState
from baton.metadata.request import SamplingParams

BOUND = 1e-4
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
        return Solo(model, **settings(name, model, tmp_path))

    return make


def asked(index: int) -> SamplingParams:
    return params(60, seed=index, **PARAMS[index])


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(512) for _ in range(num)] for num in LENS]


def is_told(seed: int, position: int) -> bool:
    """Sometimes none of a round's drafts is right, sometimes all are."""
    return (position + 3 * seed) % 7 not in (2, 3)


def check(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After every round, each sequence's tokens are those of no speculation, and its state is what a recompute from
    scratch gives. Slots beyond the tokens are spoilt between rounds. Returns how many each round accepted."""
    truths = {}
    for index, prompt in enumerate(prompts()):
        plain = solo.start(prompt, asked(index))
        truths[index] = prompt + solo.run(plain, 45, 0)
    coach(monkeypatch, truths, is_told)
    sequences = [solo.start(prompt, asked(index)) for index, prompt in enumerate(prompts())]
    for members, num_steps in ROUNDS:
        batch = [sequences[index] for index in members]
        for sequence in sequences:
            solo.poison(sequence)
        solo.round(batch, min(num_steps, solo.drafter.num_steps))
        for index, sequence in enumerate(sequences):
            assert sequence.token_ids == truths[index][: len(sequence.token_ids)], index
            check_against_scratch(solo, sequence)
    return [count for sequence in sequences for count in sequence.num_accepted]


def check_against_scratch(solo: Solo, sequence: Running) -> None:
    scratch = solo.from_scratch(sequence)
    ours, theirs = sequence.draft, scratch.draft
    assert ours is not None and theirs is not None
    assert (ours.tokens is None) == (theirs.tokens is None) and (ours.hidden is None) == (theirs.hidden is None)
    if ours.tokens is not None and theirs.tokens is not None:
        assert ours.tokens.tolist() == theirs.tokens.tolist()
    for state, anew in ((ours.hidden, theirs.hidden), (ours.rows, theirs.rows)):
        assert (state is None) == (anew is None)
        if state is not None and anew is not None:
            assert float((state - anew).abs().max()) < BOUND * float(anew.abs().max())
    kv, anew = solo.draft_kv(sequence), solo.draft_kv(scratch)
    if kv is not None and anew is not None:
        assert float((kv - anew).abs().max()) < BOUND
    assert float((solo.target_kv(sequence) - solo.target_kv(scratch)).abs().max()) < BOUND


@pytest.mark.parametrize("name", ALL)
def test_state_is_that_of_a_recompute_after_every_round(
    name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo(name)
    accepted = check(solo, monkeypatch)
    assert {0, solo.drafter.num_steps} < set(accepted), accepted  # none, all, and some


STATEFUL = (*SHIFTED, "frozen-kv-mtp")


@pytest.mark.parametrize("name", ["eagle3", "frozen-kv-mtp"])
def test_state_left_in_a_shared_buffer_is_caught(
    name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: states stay views of one static buffer, row by row, and another batch's round overwrites them."""
    solo = make_solo(name)
    kind: Any = frozen_kv.FrozenKvDrafter if name == "frozen-kv-mtp" else shifted.ShiftedDrafter
    observe, buffer = kind.observe, solo.drafter.hidden.allocate("recurrent", 4)
    assert buffer is not None

    def keeping(self: Any, sequences: Any, *rest: Any) -> None:
        observe(self, sequences, *rest)
        for row, sequence in enumerate(sequences):
            buffer[row] = sequence.draft.hidden
            sequence.draft = DraftState(sequence.draft.tokens, buffer[row])

    monkeypatch.setattr(kind, "observe", keeping)
    with caught():
        check(solo, monkeypatch)


@pytest.mark.parametrize("name", ["eagle3", "frozen-kv-mtp"])
def test_state_of_the_last_row_is_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: the state selected is the round's last row, right only where all drafts were accepted."""
    solo = make_solo(name)
    kind: Any = frozen_kv.FrozenKvDrafter if name == "frozen-kv-mtp" else shifted.ShiftedDrafter
    observe = kind.observe

    def last(self: Any, sequences: Any, hidden: torch.Tensor, targets: torch.Tensor, num_accepted: Any) -> None:
        observe(self, sequences, hidden, targets, [targets.shape[1] - 1] * len(num_accepted))

    monkeypatch.setattr(kind, "observe", last)
    with caught():
        check(solo, monkeypatch)


@pytest.mark.parametrize("name", ["eagle3", "frozen-kv-mtp"])
def test_state_of_an_earlier_round_is_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: a round without drafts keeps the state of the round before."""
    solo = make_solo(name)
    kind: Any = frozen_kv.FrozenKvDrafter if name == "frozen-kv-mtp" else shifted.ShiftedDrafter
    observe = kind.observe

    def lazy(self: Any, sequences: Any, hidden: torch.Tensor, targets: torch.Tensor, num_accepted: Any) -> None:
        if targets.shape[1] > 1:
            observe(self, sequences, hidden, targets, num_accepted)

    monkeypatch.setattr(kind, "observe", lazy)
    with caught():
        check(solo, monkeypatch)


def test_an_empty_batch_of_tails_is_nothing(make_solo: MakeSolo) -> None:
    for name in STATEFUL:
        drafter = make_solo(name).drafter
        assert drafter.finish_prompt([], drafter.hidden.allocate("extend", 0)) == []
