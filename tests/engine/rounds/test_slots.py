"""Slots against the states of their sequences: what was loaded and advanced reads as if it were built anew."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_columns import column, filled_column
from drafters import settings, target_of
from layouts import make_layout
from node_pair import params
from solo import Solo

from baton.engine.drafters.base import DraftState
from baton.engine.rounds.slots import Slots, missed_row
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.state import Needs, SamplingState
from baton.engine.work import MAX_MISSED
from baton.metadata.handoff.schema.hidden_layout import HiddenLayout
from baton.metadata.wire.request import SamplingParams

CPU = torch.device("cpu")
VOCAB, NUM_SLOTS = 23, 5
FIELDS: list[dict[str, Any]] = [  # each asks for something of its own
    {"temperature": 0.0},
    {"temperature": 0.3, "seed": 2**40, "top_k": 7, "top_p": 0.1 + 0.2, "min_p": 0.25},
    {"temperature": 0.0, "repetition_penalty": 2.0},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": -0.25},
    {"temperature": 0.0, "logit_bias": {3: 4.0, 9: -2.5}},
    {"temperature": 0.7, "min_tokens": 9, "stop_ids": (0, 5)},
]
ALL = Needs(is_random=True, ranks=True, cuts=True, penalizes=True, biases=True, bans=True)
VOCABULARY = {"prompt_mask": "penalizes", "output_counts": "penalizes", "bias": "biases", "stops": "bans"}
COLUMNS = ("ints", "floats", "top_p", *VOCABULARY)


@dataclass(slots=True)
class Held:
    """A sequence in a slot: its prompt and output, of which the last token has no KV yet."""

    slot: int
    fields: dict[str, Any]
    prompt: list[int]
    output: list[int]

    @property
    def state(self) -> SamplingState:
        return SamplingState(SamplingParams(max_tokens=99, **self.fields), self.prompt, self.output, vocab_size=VOCAB)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output) - 1

    def load(self, slots: Slots) -> None:
        slots.load(self.slot, self.length, self.output[-1], self.state, None)


def make_sequence(rng: random.Random, slot: int, fields: dict[str, Any]) -> Held:
    ids = [rng.randrange(VOCAB) for _ in range(9)]
    split = rng.randint(1, 8)
    return Held(slot, fields, ids[:split], ids[split:])


def check(slots: Slots, sequences: Sequence[Held], needs: Needs | None = None) -> None:
    """Check that the slots read as a batch that is built of the sequences. A column of the vocabulary counts in the
    rows of sequences that ask for it."""
    expected = SamplingBatch.of([each.state for each in sequences])
    needs = needs or expected.needs
    rows = slots.read(torch.tensor([each.slot for each in sequences]), torch.zeros(len(sequences), 1), needs)
    assert rows.lengths.tolist() == [each.length for each in sequences]
    assert rows.last_tokens.tolist() == [each.output[-1] for each in sequences]
    assert rows.sampling.needs == needs and torch.equal(rows.sampling.ints, expected.ints)
    if not needs.is_plain_greedy:  # else never read
        assert torch.equal(rows.sampling.floats, expected.floats) and torch.equal(rows.sampling.top_p, expected.top_p)
    for name, need in VOCABULARY.items():
        asking = [row for row, each in enumerate(sequences) if getattr(each.state.needs, need)]
        if asking:
            ours, theirs = filled_column(rows.sampling, name), filled_column(expected, name)
            assert ours.dtype == theirs.dtype and torch.equal(ours[asking], theirs[asking]), name


def advance(slots: Slots, rng: random.Random, sequences: Sequence[Held], num_padding: int = 0) -> None:
    """Run a round of made-up tokens, of which each sequence takes some, and rows of padding others."""
    num_steps, num_rows = 3, len(sequences) + num_padding
    targets = torch.tensor([[rng.randrange(VOCAB) for _ in range(num_steps + 1)] for _ in range(num_rows)])
    num_accepted = torch.tensor([rng.randint(0, num_steps) for _ in range(num_rows)])
    index = torch.tensor([each.slot for each in sequences] + [slots.padding] * num_padding)
    needs = Needs.any_of(each.state.needs for each in sequences)
    is_valid = torch.ones(targets.shape, dtype=torch.bool)
    numbers = slots.advance(index, targets, is_valid, num_accepted, None, needs)
    assert torch.equal(numbers[: len(sequences), 0], num_accepted[: len(sequences)])
    for each, row, accepted in zip(sequences, targets.tolist(), num_accepted.tolist(), strict=False):
        each.output += row[: accepted + 1]


@pytest.mark.parametrize("seed", range(5))
def test_slots_read_as_their_sequences_built_anew(seed: int) -> None:
    """Sequences come and go, take slots of others, and advance beside other sequences and padding."""
    rng = random.Random(seed)
    slots = Slots(NUM_SLOTS, VOCAB, None, CPU)
    running: dict[int, Held] = {}
    for _ in range(60):
        slot = rng.randrange(NUM_SLOTS)
        running[slot] = make_sequence(rng, slot, rng.choice(FIELDS))
        running[slot].load(slots)
        batch = rng.sample(list(running.values()), rng.randint(1, len(running)))
        advance(slots, rng, batch, num_padding=rng.randint(0, 2))
        check(slots, batch)
        check(slots, list(running.values()))


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_columns_that_nobody_needs_are_not_read(fields: dict[str, Any]) -> None:
    rng, slots = random.Random(1), Slots(NUM_SLOTS, VOCAB, None, CPU)
    slots.allocate_all()
    one = make_sequence(rng, 2, fields)
    one.load(slots)
    expected = SamplingBatch.of([one.state])
    found = slots.read(torch.tensor([2]), torch.zeros(1, 1), expected.needs).sampling
    assert [column(found, name) is None for name in COLUMNS] == [column(expected, name) is None for name in COLUMNS]


def test_columns_of_the_vocabulary_are_there_when_the_first_request_needs_them() -> None:
    rng, slots = random.Random(1), Slots(NUM_SLOTS, VOCAB, None, CPU)
    make_sequence(rng, 0, FIELDS[0]).load(slots)
    for index, name in ((4, "_bias"), (5, "_stops"), (2, "_output_counts")):
        assert getattr(slots, name) is None
        make_sequence(rng, 0, FIELDS[index]).load(slots)
        assert getattr(slots, name).shape == (NUM_SLOTS + 1, VOCAB)


def test_columns_that_are_allocated_for_graphs_keep_what_they_hold() -> None:
    rng, slots = random.Random(1), Slots(NUM_SLOTS, VOCAB, None, CPU)
    sequences = [make_sequence(rng, slot, FIELDS[index]) for slot, index in enumerate((2, 4))]
    for each in sequences:
        each.load(slots)
    slots.allocate_all()
    check(slots, sequences)
    check(slots, sequences, ALL)


def test_padding_is_one_greedy_token_whatever_runs_beside_it() -> None:
    rng, slots = random.Random(1), Slots(NUM_SLOTS, VOCAB, None, CPU)
    slots.allocate_all()
    index, table = torch.tensor([slots.padding] * 2), torch.zeros(2, 1)
    before = slots.read(index, table, ALL)
    columns = [filled_column(before.sampling, name) for name in COLUMNS]
    assert before.lengths.tolist() == [1, 1] and before.sampling.floats[0].tolist() == [0.0, 0.0]
    sequences = [make_sequence(rng, slot, fields) for slot, fields in enumerate(FIELDS[:NUM_SLOTS])]
    for each in sequences:
        each.load(slots)
    for _ in range(5):
        advance(slots, rng, sequences, num_padding=2)
    after = slots.read(index, table, ALL)
    assert torch.equal(before.lengths, after.lengths) and torch.equal(before.last_tokens, after.last_tokens)
    for name, expected in zip(COLUMNS, columns, strict=True):
        assert torch.equal(filled_column(after.sampling, name), expected), name


def test_rows_are_copies_but_for_the_vocabulary() -> None:
    """What is known of each token is read where it lies, and one number of a row as it was."""
    rng, slots = random.Random(1), Slots(NUM_SLOTS, VOCAB, None, CPU)
    one = make_sequence(rng, 3, FIELDS[3])
    one.load(slots)
    kept = slots.read(torch.tensor([3]), torch.zeros(1, 1), ALL)
    length, position = one.length, kept.sampling.positions.clone()
    advance(slots, rng, [one])
    assert kept.lengths.tolist() == [length] != [one.length] and torch.equal(kept.sampling.positions, position)
    counts = filled_column(kept.sampling, "output_counts")[0]
    assert {int(i): int(counts[i]) for i in counts.nonzero()} == Counter(one.output)


def test_a_state_of_another_position_is_our_bug() -> None:
    one = make_sequence(random.Random(1), 0, FIELDS[0])
    with pytest.raises(AssertionError):
        Slots(NUM_SLOTS, VOCAB, None, CPU).load(0, one.length + 1, one.output[-1], one.state, None)


# --- what a drafter keeps in slots ---


@dataclass(frozen=True)
class KeepingDrafter:
    """The parts of a drafter that slots ask. Its state is one token and, unless standalone, a hidden row."""

    algorithm: str = "eagle"
    has_kv: bool = True

    @property
    def hidden(self) -> HiddenLayout:
        return make_layout(self.algorithm)

    def allocate(self, num_rows: int) -> DraftState:
        tokens = torch.zeros(num_rows, 1, dtype=torch.int64)
        return DraftState(tokens, hidden=self.hidden.allocate("recurrent", num_rows, CPU))


def slots_of(drafter: Any) -> Slots:
    return Slots(NUM_SLOTS, VOCAB, drafter, CPU)


def drafts(*tokens: int) -> DraftState:
    return DraftState(
        torch.tensor(tokens).unsqueeze(1), hidden=torch.tensor(tokens).unsqueeze(1).expand(-1, 32).float()
    )


def test_a_drafters_state_is_that_of_the_slot() -> None:
    slots, rng = slots_of(KeepingDrafter()), random.Random(1)
    one = make_sequence(rng, 3, FIELDS[0])
    slots.load(3, one.length, one.output[-1], one.state, drafts(7))
    slots.load_draft(torch.tensor([4, 0]), drafts(8, 9))
    index, table = torch.tensor([0, 3, 4, 1]), torch.zeros(4, 1)
    found = slots.read(index, table, Needs()).draft
    assert found.tokens is not None and found.hidden is not None
    assert found.tokens.flatten().tolist() == found.hidden[:, 5].tolist() == [9, 7, 8, 0]
    assert not slots.read(index, table, Needs(), with_draft=False).draft.present()
    two, none = torch.tensor([[1, 2]]), torch.zeros(1, dtype=torch.int64)
    for draft, expected in ((None, 7), (drafts(5), 5)):  # a round that drafted nothing leaves the state as it was
        slots.advance(torch.tensor([3]), two, torch.ones(1, 2, dtype=torch.bool), none, draft, Needs())
        tokens = slots.read(torch.tensor([3]), table[:1], Needs()).draft.tokens
        assert tokens is not None and tokens.tolist() == [[expected]]


@pytest.mark.parametrize(
    "wrong",
    [
        DraftState(torch.zeros(1, 1, dtype=torch.int64)),
        DraftState(torch.zeros(1, 1, dtype=torch.int64), hidden=torch.zeros(1, 31)),
    ],
    ids=["fields", "width"],
)
def test_a_state_of_another_drafter_is_refused(wrong: DraftState) -> None:
    with pytest.raises(ValueError, match=r"draft state of|hidden"):
        slots_of(KeepingDrafter()).load_draft(torch.tensor([1]), wrong)


@pytest.mark.parametrize(
    ("drafter", "num_kept"),
    [(None, 0), (KeepingDrafter(has_kv=False), 0), (KeepingDrafter("standalone"), 1), (KeepingDrafter(), 2)],
)
def test_missed_rows_are_kept_for_drafters_with_kv(drafter: Any, num_kept: int) -> None:
    """Tokens, and states if the drafter takes any."""
    kept = slots_of(drafter)._missed
    assert len(kept) == num_kept and all(len(each) == (NUM_SLOTS + 1) * (MAX_MISSED + 1) for each in kept)


def test_missed_rows_of_slots_lie_apart() -> None:
    """Those that a slot has no place for share one, which is its own too."""
    rows = [
        missed_row(np.full(MAX_MISSED + 3, slot), np.arange(MAX_MISSED + 3)).tolist() for slot in range(NUM_SLOTS + 1)
    ]
    kept = [row for own in rows for row in own[:MAX_MISSED]]
    lost = [set(own[MAX_MISSED:]) for own in rows]
    assert all(len(each) == 1 for each in lost)
    assert sorted([*kept, *set().union(*lost)]) == list(range((NUM_SLOTS + 1) * (MAX_MISSED + 1)))


def test_missed_tokens_come_back_with_the_last_one_behind_them() -> None:
    """A standalone drafter takes no states."""
    slots = slots_of(KeepingDrafter("standalone"))
    first = torch.from_numpy(missed_row(np.array([3, 5]), np.array([0, 0])))
    for row in range(4):
        slots.keep_missed(first + row, torch.tensor([10 + row, 20 + row]), None)
    found, extend = slots.missed(first + 1, torch.tensor([3, 2]), torch.tensor([90, 91]), 3)
    assert extend is None
    with pytest.raises(AssertionError):  # rows of the next slot
        slots.missed(first, torch.tensor([1, 1]), torch.tensor([90, 91]), MAX_MISSED + 1)
    assert found[0].tolist() == [11, 12, 13, 90] and found[1, :3].tolist() == [21, 22, 91]


def test_columns_that_a_round_allocated_take_sequences(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Rounds run in inference mode, where graphs allocate all columns at once; a node admits outside of it."""
    model = target_of("eagle", checkpoint)
    solo, other = (Solo(model, num_pages=40, **settings("eagle", model, tmp_path / each)) for each in ("a", "b"))
    with torch.inference_mode():
        solo.rounds.executor.slots.allocate_all()
    wants = params(20, temperature=0.8, seed=3, repetition_penalty=1.3, logit_bias={5: 1.5}, min_tokens=4)
    outputs = [each.run(each.start([1, 2, 3, 4], wants), 16, 2) for each in (solo, other)]
    assert outputs[0] == outputs[1]


def test_rows_that_a_sequence_does_not_lack_are_zeros() -> None:
    """Those of others, or of the sequence that had the slot before, may hold no numbers."""
    slots = slots_of(KeepingDrafter())
    tokens, states = slots._missed
    states.fill_(float("nan"))
    first = torch.from_numpy(missed_row(np.array([3, 5]), np.array([0, 0])))
    for row in range(3):
        slots.keep_missed(first + row, torch.tensor([10 + row, 20 + row]), torch.full((2, states.shape[1]), row + 1.0))
    kept = tokens[first + 2].flatten().tolist()
    found, extend = slots.missed(first + 1, torch.tensor([2, 1]), torch.tensor([90, 91]), 4)
    assert kept == [12, 22] and found[0, :3].tolist() == [11, 12, 90] and found[1, :2].tolist() == [21, 91]
    assert extend is not None and extend[:, :, 0].tolist() == [[2.0, 3.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]
    assert extend.isfinite().all()
