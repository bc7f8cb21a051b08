"""S5 for what a round writes: every input buffer except the declared outputs keeps its bytes.

The declared outputs are the lengths, last tokens, output counts and draft states of the round's own sequences, missed
rows, and KV from the first row that the round computes. All other bytes are compared before and after each round.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import ALIKE, ALL, TREES_OF_FAMILIES, settings, target_of
from heads import LAYERED
from node_pair import params
from solo import Running, Solo, caught, frozen_fields
from thinned import thinned

from baton.engine.drafters.base import DraftState
from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds import device_executor as rounds
from baton.engine.rounds.inputs import RoundInputs
from baton.engine.rounds.slots import Slots
from baton.engine.sampling.batch import INTS

PROMPT = random.Random(5).choices(range(512), k=7)
TREES = ("eagle", "eagle3", "mtp-deepseek", "mtp-mimo", "frozen-kv-mtp", *TREES_OF_FAMILIES)
ADVANCED = [0, 1, *(2 + INTS.index(name) for name in ("position", "num_generated"))]  # columns of Slots._ints
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {3: 1.0}}

MakeSolo = Callable[..., Solo]


@pytest.fixture
def make_solo(checkpoint: Callable[..., Path], tmp_path: Path) -> MakeSolo:
    def make(name: str, **shape: Any) -> Solo:
        model = target_of(name, checkpoint)
        return Solo(model, num_slots=4, buckets=(3,), num_pages=100, **(settings(name, model, tmp_path) | shape))

    return make


class Buffers:
    """Copies of everything that a round reads and must not change."""

    def __init__(self, solo: Solo, inputs: RoundInputs, sequences: Sequence[Running]) -> None:
        self._solo, self._inputs, self._sequences = solo, inputs, sequences
        self._before = self._copies()

    def check(self) -> None:
        after = self._copies()
        assert after.keys() == self._before.keys()
        for name, value in self._before.items():
            assert value.numpy().tobytes() == after[name].numpy().tobytes(), name

    def _copies(self) -> dict[str, torch.Tensor]:
        slots, engine = self._solo.rounds.executor.slots, self._solo.engine
        fixed = [row for row in range(len(slots._ints)) if row not in ADVANCED]
        idle = [row for row in range(slots.num_slots) if row not in [each.slot for each in self._sequences]]
        copies = {f"input {name}": each.clone() for name, each in self._inputs._asdict().items() if each is not None}
        for name in ("_floats", "_top_p", "_prompt_mask", "_bias", "_stops"):
            if getattr(slots, name) is not None:
                copies[name] = getattr(slots, name).clone()
        copies |= {"parameters": slots._ints[fixed].clone(), "padding": slots._ints[:, slots.padding].clone()}
        if slots._output_counts is not None:
            copies["counts"] = slots._output_counts[[*idle, slots.padding]].clone()
        copies |= {f"draft.{name}": value[idle].clone() for name, value in slots._draft.present()}
        num_again = self._solo.drafter.hidden.num_target_rows  # rows before L that an extend computes again
        for pool, kv in enumerate(engine.kvs):
            for index, sequence in enumerate(self._sequences):
                rows = kv[:, sequence.pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
                num_settled = self._solo.num_settled(kv, sequence.num_computed)
                copies[f"kv {pool} {index}"] = rows[:, :, :, : num_settled - (num_again if pool else 0)]
            used = {0}.union(*(each.pages for each in self._sequences))
            copies[f"kv {pool} of nobody"] = kv[:, [page for page in range(kv.shape[1]) if page not in used]]
        return {name: value.contiguous().clone() for name, value in copies.items()}


def check(solo: Solo, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Run rounds of two sequences in a bucket of three, and compare the buffers around each step of a round."""
    sequences = [solo.start(PROMPT[i:] + PROMPT[:i], params(24, seed=i, **fields)) for i in range(2)]
    run_round, num_checked = rounds.run_round, []

    def watched(engine: Any, drafter: Any, slots: Any, inputs: RoundInputs, *rest: Any) -> Any:
        buffers, before = Buffers(solo, inputs, sequences), [frozen_fields(sequence) for sequence in sequences]
        result = run_round(engine, drafter, slots, inputs, *rest)
        buffers.check()
        assert [frozen_fields(sequence) for sequence in sequences] == before
        num_checked.append(1)
        return result

    monkeypatch.setattr(rounds, "run_round", watched)
    steps = solo.rounds.shape.num_steps
    for num_steps in (steps, 0, 1 if solo.rounds.shape.is_chain else steps, steps):
        solo.round(sequences, num_steps, [num_steps, num_steps // 2])
    assert len(num_checked) == 4


def some(names: Sequence[str]) -> list[Any]:
    """Return names with parameters. The gate runs each drafter, and each kind of pools, with one of the parameters."""
    return thinned(itertools.product(names, [{}, SAMPLED]), lambda i, name, _: i % 4 in (0, 3) and name not in ALIKE)


@pytest.mark.parametrize(("name", "fields"), some(["ngram", *ALL]))
def test_a_round_writes_its_outputs_only(
    name: str, fields: dict[str, Any], make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(make_solo(name), monkeypatch, **fields)


@pytest.mark.parametrize(("name", "fields"), some(TREES))
def test_a_round_of_a_tree_writes_its_outputs_only(
    name: str, fields: dict[str, Any], make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(make_solo(name, draft_topk=2, draft_steps=3), monkeypatch, **fields)


# --- the defects put back ---


@pytest.mark.parametrize("name", ["eagle", "standalone", "frozen-kv-mtp"])
def test_lengths_advanced_in_place_are_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: drafting advances positions in the caller's tensors, which are the slots' own."""
    solo = make_solo(name)
    propose = type(solo.drafter).propose

    def counting(self: Any, rows: Any, shape: DraftShape) -> Any:
        drafts = propose(self, rows, shape)
        rows.block_table.add_(1)
        return drafts

    monkeypatch.setattr(type(solo.drafter), "propose", counting)
    with caught():
        check(solo, monkeypatch)


def test_a_write_to_another_sequences_slot_is_caught(make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: draft states are stored in the next slot."""
    solo = make_solo("eagle")
    store = DraftState.store

    def further(self: DraftState, index: torch.Tensor, state: DraftState) -> None:
        store(self, (index + 1) % 5 if len(index) > 1 else index, state)

    monkeypatch.setattr(DraftState, "store", further)
    with caught():
        check(solo, monkeypatch)


@pytest.mark.parametrize("name", LAYERED)
def test_rows_computed_again_are_no_more_than_declared(
    name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: an extend begins one row too early and overwrites KV."""
    solo = make_solo(name)
    read = Slots.read

    def early(self: Slots, *rest: Any, **options: Any) -> Any:
        rows = read(self, *rest, **options)
        rows.lengths.sub_(1)
        return rows

    monkeypatch.setattr(Slots, "read", early)
    with caught():
        check(solo, monkeypatch)
