"""S5: every forward stands where DESIGN.md section 4 says, and rounds leave the draft KV that a recompute gives.

Covers chains run by direct calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import ALL, NAMES, SHIFTED, settings, target_of
from node_pair import params
from solo import Running, Solo, caught, coach, frozen_fields, spied

from baton.engine.batch import BatchRow
from baton.engine.drafters import frozen_kv, shifted, standalone
from baton.engine.drafters.base import DraftState

PROMPT = [random.Random(5).randrange(512) for _ in range(7)]
BOUND = 1e-4

MakeSolo = Callable[..., Solo]
Row = tuple[list[int], list[int]]  # tokens, positions


@pytest.fixture
def make_solo(checkpoint: Callable[..., Path], tmp_path: Path) -> MakeSolo:
    def make(name: str) -> Solo:
        model = target_of(name, checkpoint)
        return Solo(model, **settings(name, model, tmp_path))

    return make


# --- where forwards stand ---


def forwards(solo: Solo, num_steps: int, num_rounds: int = 2) -> tuple[list[list[Row]], list[Running]]:
    """Every forward of the drafter, for the prompt and for each round; the sequence as it was before each round."""
    groups: list[list[Row]] = []
    before: list[Running] = []
    with spied(solo.drafter) as log:
        sequence = solo.start(PROMPT, params(40))
        for _ in range(num_rounds + 1):
            groups.append([(each.tokens, each.positions) for each in log])
            log.clear()
            before.append(copy_of(sequence))
            solo.round([sequence], num_steps)
    return groups, before


def copy_of(sequence: Running) -> Running:
    return Running(
        7, list(sequence.token_ids), sequence.num_computed, sequence.pages, sequence.sampling, sequence.draft
    )


def expected(name: str, num_steps: int, L: int, tokens: list[int]) -> list[list[int]]:  # noqa: N803
    """Positions of a round's forwards; `tokens` end with the bonus token, which belongs at L."""
    assert len(tokens) == L + 1
    if name == "standalone":  # the last one only fills a slot
        return [[L + j] for j in range(num_steps + 1)]
    if name == "frozen-kv-mtp":
        return [[L - 1]] * num_steps
    return [[L + j] for j in range(num_steps - 1)] + [list(range(L, L + num_steps + 1))]


def check_positions(name: str, solo: Solo, num_steps: int) -> None:
    groups, before = forwards(solo, num_steps)
    first = before[0].token_ids[7]
    if name == "standalone":
        assert groups[0] == [(PROMPT, list(range(7)))]
    elif name == "frozen-kv-mtp":
        assert groups[0] == []
    else:  # row i is (state i, token i + 1); the last waits for the sampled token
        assert groups[0] == [(PROMPT[1:], list(range(6))), ([first], [6])]
    for rows, sequence in zip(groups[1:], before, strict=False):
        assert [positions for _, positions in rows] == expected(
            name, num_steps, sequence.num_computed, sequence.token_ids
        )
        if name not in SHIFTED and rows:  # the first is fed the bonus token
            assert rows[0][0] == sequence.token_ids[-1:]
        elif num_steps > 1:  # the first is fed d_1
            assert sequence.draft is not None and sequence.draft.tokens is not None
            assert rows[0][0] == [int(sequence.draft.tokens)]


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_forwards_stand_where_they_belong(name: str, num_steps: int, make_solo: MakeSolo) -> None:
    check_positions(name, make_solo(name), num_steps)


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_one_position_off_is_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    solo = make_solo(name)
    module = {"standalone": standalone, "frozen-kv-mtp": frozen_kv}.get(name, shifted)

    def late(ids: Any, position: int, *rest: Any) -> BatchRow:
        return BatchRow(ids, position + (len(ids) == 1 and position > 6), *rest)

    def bonus_position(ids: Any, position: int, *rest: Any) -> BatchRow:
        return BatchRow(ids, position + 1, *rest)

    monkeypatch.setattr(module, "BatchRow", bonus_position if name == "frozen-kv-mtp" else late)
    with caught():
        check_positions(name, solo, 3)


def test_frozen_forwards_see_only_the_targets_rows(make_solo: MakeSolo) -> None:
    solo = make_solo("frozen-kv-mtp")
    with spied(solo.drafter) as log:
        sequence = solo.start(PROMPT, params(40))
        solo.round([sequence], 4)
    assert [each.seq_lens for each in log] == [(7,)] * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_round_changes_nothing_but_the_draft_state(name: str, make_solo: MakeSolo) -> None:
    """Tokens, positions, pages and the caller's own draft state are bytewise what they were."""
    solo = make_solo(name)
    sequence = solo.start(PROMPT, params(40, temperature=1.0, seed=1, presence_penalty=0.5))
    for num_steps in (1, 4):
        state, fields = sequence.draft, frozen_fields(sequence)
        assert state is not None and sequence.sampling.output_counts is not None
        kept = [None if each is None else each.clone() for each in (state.tokens, state.hidden)]
        counts = sequence.sampling.output_counts.clone()
        solo.rounds.run([sequence], num_steps)
        assert frozen_fields(sequence) == fields
        assert torch.equal(sequence.sampling.output_counts, counts)
        for was, each in zip(kept, (state.tokens, state.hidden), strict=True):
            assert was is each or (was is not None and each is not None and torch.equal(was, each))


# --- what rounds leave behind ---


def check_kv(name: str, solo: Solo, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Draft KV and state after rounds with all kinds of acceptance equal a recompute from scratch, though every slot
    beyond a sequence's tokens is spoilt before each round. Returns how many each round accepted."""
    asked = params(40, temperature=1.0, seed=3)
    plain = solo.start(PROMPT, asked)
    truth = PROMPT + solo.run(plain, 36, 0)
    coach(monkeypatch, {3: truth}, lambda _, position: position % 7 not in (2, 3))
    sequence = solo.start(PROMPT, asked)
    for num_steps in (1, 3, 5, 2, 4, 1, 5):
        solo.poison(sequence)
        solo.round([sequence], min(num_steps, solo.drafter.num_steps))
        assert sequence.token_ids == truth[: len(sequence.token_ids)]
        check_against_scratch(solo, sequence)
    return sequence.num_accepted


def check_against_scratch(solo: Solo, sequence: Running) -> None:
    scratch = solo.from_scratch(sequence)
    ours, theirs = solo.draft_kv(sequence), solo.draft_kv(scratch)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert float((ours - theirs).abs().max()) < BOUND, (ours - theirs).abs().amax((0, 1, 2, 4))
    check_state(sequence.draft, scratch.draft)


def check_state(ours: DraftState | None, theirs: DraftState | None) -> None:
    assert ours is not None and theirs is not None
    assert (ours.tokens is None) == (theirs.tokens is None) and (ours.hidden is None) == (theirs.hidden is None)
    if ours.tokens is not None and theirs.tokens is not None:
        assert ours.tokens.tolist() == theirs.tokens.tolist()
    if ours.hidden is not None and theirs.hidden is not None:
        assert float((ours.hidden - theirs.hidden).abs().max()) < BOUND * float(theirs.hidden.abs().max())


@pytest.mark.parametrize("name", ALL)
def test_rounds_leave_what_a_recompute_gives(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = check_kv(name, make_solo(name), monkeypatch)
    assert 0 in accepted and max(accepted) > 1 and 0 < sum(accepted) < 21, accepted


@pytest.mark.parametrize("name", SHIFTED)
def test_rows_kept_from_drafting_are_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: extend computes the accepted row alone, and rows before it stay as drafting left them, made from the
    head's own states instead of the target's."""
    solo = make_solo(name)

    def observe(
        self: Any, sequences: Any, hidden: torch.Tensor, targets: torch.Tensor, num_accepted: list[int]
    ) -> None:
        for row, (sequence, count) in enumerate(zip(sequences, num_accepted, strict=True)):
            rows = [BatchRow([0], sequence.num_computed + count, sequence.pages)]
            last = self._forward(rows, targets[row, count : count + 1], hidden[row, count : count + 1], is_extend=True)
            state = sequence.sampling.ahead(count + 1, targets[row, : count + 1])
            token = shifted.sample_ahead(self._head.logits(last), [state], targets[:1, :0])
            sequence.draft = DraftState(token, last[0])

    monkeypatch.setattr(shifted.ShiftedDrafter, "observe", observe)
    with caught():
        check_kv(name, solo, monkeypatch)


def test_a_slot_left_empty_after_full_acceptance_is_caught(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: a standalone draft never runs its last proposal, whose slot stays empty when all are accepted."""
    solo = make_solo("standalone")
    propose = standalone.StandaloneDrafter.propose

    def hasty(self: Any, sequences: Any, num_steps: int) -> torch.Tensor:
        drafted = propose(self, sequences, num_steps)
        for sequence in sequences:
            kept = sequence.num_computed
            sequence.num_computed += num_steps
            solo.poison(sequence)
            sequence.num_computed = kept
        return drafted

    monkeypatch.setattr(standalone.StandaloneDrafter, "propose", hasty)
    with caught():
        check_kv("standalone", solo, monkeypatch)
