"""S4 for static inputs: rounds in a bucket give the results of the direct path, and padding rows affect no sequence.

The largest bucket is 2. Batches have 1, 2, 3, 2, 3 and 1 sequences, the draft length alternates between 0, 1 and 5,
each row has its own limit, and drafts are partly accepted. Before each round, everything that it could read by mistake
is overwritten with plausible but wrong values.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import ALL, settings, target_of
from node_pair import params
from scratch import Outsiders, check_against_scratch, check_state
from solo import Running, Solo, caught, coach, plain_texts, spoil
from thinned import thinned

from baton.engine.rounds import slots
from baton.engine.rounds.inputs import InputBlock, RoundInputs
from baton.engine.rounds.rounds import Rounds
from baton.engine.work import MAX_MISSED, Round
from baton.kernels.state.rows import advance_ref_
from baton.metadata.wire.request import SamplingParams

LENS = (7, 12, 3)
NUM_TOKENS = 50
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 1.3, "logit_bias": {7: 2.0}, "presence_penalty": 0.3},
]
MEMBERS = ((0,), (1, 0), (2, 1, 0), (0, 2), (1, 2, 0), (2,))
STEPS = (0, 1, 5)
ROUNDS = [*zip(MEMBERS, itertools.cycle(STEPS)), *zip(MEMBERS, itertools.cycle((5, 0, 1)))]

MakeSolo = Callable[..., Solo]


@pytest.fixture
def make_solo(checkpoint: Callable[..., Path], tmp_path: Path) -> MakeSolo:
    written: dict[str, dict[str, Any]] = {}

    def make(name: str, *buckets: int) -> Solo:
        model = target_of(name, checkpoint)
        texts(model)
        if name not in written:
            written[name] = settings(name, model, tmp_path)
        return Solo(model, num_slots=5, buckets=buckets, num_pages=300, **written[name])

    return make


def asked(index: int) -> SamplingParams:
    return params(60, seed=index, **PARAMS[index])


def prompts() -> list[list[int]]:
    rng = random.Random(14)
    return [[rng.randrange(512) for _ in range(num)] for num in LENS]


@functools.cache
def texts(model: Path) -> dict[int, list[int]]:
    """Return each prompt with the text after it, by seed. Call it first before a defect is put back."""
    return plain_texts(model, prompts(), asked, NUM_TOKENS)


def limits_of(members: Sequence[int], num_steps: int, turn: int) -> list[int]:
    """Return limits: all drafts, half of them or none, for another sequence in each round."""
    return [(num_steps, num_steps // 2, 0)[(index + turn) % 3] for index in members]


def start(solo: Solo) -> list[Running]:
    return [solo.start(prompt, asked(index)) for index, prompt in enumerate(prompts())]


def check(bucketed: Solo, direct: Solo, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare both round by round. The drafters are told most of the text. Return how many drafts each round
    accepted."""
    truths = texts(direct.engine.model_dir)
    coach(monkeypatch, truths, lambda seed, position: (position + 3 * seed) % 7 not in (2, 3))
    theirs, ours = start(direct), start(bucketed)
    for sequence in ours:
        check_against_scratch(bucketed, sequence)
    for turn, (members, most) in enumerate(ROUNDS):
        num_steps = min(most, bucketed.drafter.shape.num_steps)
        limits = limits_of(members, num_steps, turn)
        for solo, sequences in ((bucketed, ours), (direct, theirs)):
            spoil(solo, sequences[0])
            for sequence in sequences:
                solo.poison(sequence)
            outsiders = Outsiders(solo, [each for i, each in enumerate(sequences) if i not in members])
            results = solo.round([sequences[i] for i in members], num_steps, limits)
            outsiders.check()
            assert all(result.num_accepted <= limit for result, limit in zip(results, limits, strict=True))
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.token_ids == b.token_ids == truths[index][: len(a.token_ids)], index
            assert a.num_accepted == b.num_accepted and a.num_missed == b.num_missed
            if index in members:
                check_state(bucketed.draft(a), direct.draft(b))
                check_against_scratch(bucketed, a)
    return [count for sequence in ours for count in sequence.num_accepted]


OFTEN = ("standalone", "eagle", "frozen-kv-mtp", "mtp3-deepseek")


@pytest.mark.parametrize(  # test_s4_source_of_state.py has the others
    "name", thinned(ALL, lambda i, name: name in OFTEN)
)
def test_buckets_and_the_direct_path_give_equal_results(
    name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucketed = make_solo(name, 2)
    accepted = check(bucketed, make_solo(name), monkeypatch)
    assert len(set(accepted)) > 2, accepted  # none, some, and all


def test_several_buckets_are_each_used(make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round uses the smallest bucket that holds its batch; a bucket of three may have two rows of padding."""
    bucketed = make_solo("eagle3", 1, 3)
    check(bucketed, make_solo("eagle3"), monkeypatch)
    assert bucketed.executor.buckets.sizes == [1, 3]


# --- the defects put back ---


def slot_of_a_sequence(inputs: RoundInputs, num_seqs: int) -> None:
    """The defect: padding rows have the slot of a real sequence."""
    inputs.slots[num_seqs:] = inputs.slots[0]


def pages_of_a_sequence(inputs: RoundInputs, num_seqs: int) -> None:
    """The defect: padding rows write into the pages of a real sequence."""
    inputs.block_table[num_seqs:] = inputs.block_table[0]


def limits_of_the_round_before(inputs: RoundInputs, num_seqs: int) -> None:
    inputs.limits[:num_seqs] = 5


def missed_of_the_round_before(inputs: RoundInputs, num_seqs: int) -> None:
    inputs.missed_rows[:num_seqs] = inputs.slots[:num_seqs] * (MAX_MISSED + 1) + 3


@pytest.mark.parametrize(
    "defect", [slot_of_a_sequence, pages_of_a_sequence, limits_of_the_round_before, missed_of_the_round_before]
)
def test_wrong_static_inputs_are_caught(
    defect: Callable[[RoundInputs, int], None], make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucketed = make_solo("eagle3", 2)
    fill = bucketed.executor.buckets.fill_round

    def wrong(work: Round) -> InputBlock:
        block = fill(work)
        if len(work.slots) <= 2:
            defect(block.for_round, len(work.slots))
        return block

    monkeypatch.setattr(bucketed.executor.buckets, "fill_round", wrong)
    with caught():
        check(bucketed, make_solo("eagle3"), monkeypatch)


def test_a_padding_row_that_is_not_reset_is_caught(make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    bucketed, direct = make_solo("eagle3", 2), make_solo("eagle3")

    def advance_all_(table: torch.Tensor, *others: Any) -> torch.Tensor:
        advanced, numbers = table.clone(), advance_ref_(table, *others)
        table[:, -1] = advanced[:, -1]
        table[0, -1] += 1
        return numbers

    monkeypatch.setattr(slots, "advance_", advance_all_)
    with caught():
        check(bucketed, direct, monkeypatch)


# --- rows left out ---


@pytest.mark.parametrize(
    ("name", "num_missed"),
    thinned(
        itertools.product(("eagle", "standalone", "mtp3-deepseek", "mtp3-mimo"), (1, 2, MAX_MISSED)),
        lambda i, *_: i in (2, 3, 7, 11),
    ),
)
def test_the_drafter_catches_up(
    name: str, num_missed: int, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences have missed different numbers of rounds. The proposals and state of the next round that drafts
    equal a recompute."""
    solo = make_solo(name, 2)
    asked = ({"temperature": 0.9}, {"temperature": 1.2, "logit_bias": {7: 9.0}})
    sequences = [
        solo.start(prompt, params(100, seed=1, **more)) for prompt, more in zip(prompts(), asked, strict=False)
    ]
    solo.round(sequences, 2)
    for at in range(num_missed):
        solo.round(sequences if at else sequences[:1], 0)
    assert [sequence.num_missed for sequence in sequences] == [num_missed, num_missed - 1]
    caught_up: list[int] = []
    catch_up = Rounds.catch_up

    def checking(self: Rounds, running: Sequence[Any]) -> None:
        catch_up(self, running)
        for sequence in sequences:
            caught_up.append(sequence.num_missed)
            check_against_scratch(solo, sequence)

    monkeypatch.setattr(Rounds, "catch_up", checking)
    for sequence in sequences:
        solo.poison(sequence)
    for num_steps in (1, 3):
        assert [each.num_drafted for each in solo.round(sequences, num_steps)] == [num_steps] * 2
        for sequence in sequences:
            check_against_scratch(solo, sequence)
    assert caught_up == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["eagle", "standalone", "mtp3-deepseek", "frozen-kv-mtp"])
def test_a_drafter_catches_up_before_the_ring_loses_a_row(name: str, make_solo: MakeSolo) -> None:
    """So a sequence drafts again after any number of rounds without drafts. A drafter without its own KV has nothing
    to catch up on."""
    solo = make_solo(name, 2)
    asked = params(100, seed=2, temperature=1.0)
    plain, late, other = (solo.start(prompts()[0], asked) for _ in range(3))
    truth = solo.run(plain, 80, 0)
    for _ in range(MAX_MISSED + 3):
        solo.round([late], 0)
    assert late.num_missed == (3 if solo.drafter.has_kv else 0)
    for num_steps in (3, 1, 3):
        solo.poison(late)
        solo.poison(other)
        results = solo.round([late, other], num_steps)
        assert [each.num_drafted for each in results] == [num_steps, num_steps]
        check_against_scratch(solo, late)
        check_against_scratch(solo, other)
    for sequence in (late, other):
        assert sequence.generated == truth[: len(sequence.generated)]


def test_the_drafter_has_the_kv_of_a_request_that_wants_no_drafts(make_solo: MakeSolo) -> None:
    """Its pages may serve another request, which drafts."""
    solo = make_solo("eagle", 2)
    sequence, other = (solo.start(prompts()[0], params(60, draft_steps=steps)) for steps in (0, None))
    solo.round([sequence, other], 0)
    for _ in range(4):
        results = solo.round([sequence, other], 3, [0, 3])
        assert [each.num_drafted for each in results] == [0, 3]
        assert sequence.num_missed == other.num_missed == 0
        check_against_scratch(solo, sequence)
        check_against_scratch(solo, other)
