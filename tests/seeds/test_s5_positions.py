"""S5: every forward has the right positions, and the draft KV after a round equals a recompute.

Chains run by direct calls. The test records the positions of all forwards of each drafter, and compares draft KV and
state with those computed from scratch.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from drafters import ALIKE, ALL, NAMES, OF_FAMILIES, SHIFTED, STREAM_MTP, settings, target_of
from node_pair import params
from scratch import check_against_scratch
from solo import POISON, Solo, caught, coach, plain_texts, spied
from thinned import thinned

from baton.engine.drafters import frozen_kv, shifted, standalone
from baton.engine.drafters.base import DraftState, RoundRows
from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.rounds.trees import Drafts

ASKED = params(40, temperature=1.0, seed=3)
PROMPT = random.Random(5).choices(range(512), k=7)

MakeSolo = Callable[..., Solo]
Row = tuple[list[int], list[int]]  # tokens, positions


@pytest.fixture
def make_solo(checkpoint: Callable[..., Path], tmp_path: Path) -> MakeSolo:
    def make(name: str) -> Solo:
        model = target_of(name, checkpoint)
        truth_of(model)
        return Solo(model, **settings(name, model, tmp_path))

    return make


@functools.cache
def truth_of(model: Path) -> list[int]:
    """Return the prompt with the text after it. Call it first before a defect is put back."""
    return plain_texts(model, [PROMPT], lambda _: ASKED, 36)[0]


# --- where forwards stand ---


class Before(NamedTuple):
    """A sequence as it was before a round."""

    num_computed: int
    token_ids: list[int]
    first_draft: int | None  # where the state proposes it


def forwards(solo: Solo, num_steps: int, num_rounds: int = 2) -> tuple[list[list[Row]], list[Before]]:
    """Record all forwards of the drafter, for the prompt and each round, and the sequence before each round."""
    groups: list[list[Row]] = []
    before: list[Before] = []
    with spied(solo.drafter) as log:
        sequence = solo.start(PROMPT, params(40))
        for _ in range(num_rounds + 1):
            groups.append([(each.tokens, each.positions) for each in log])
            log.clear()
            tokens = solo.draft(sequence).tokens
            first = None if tokens is None else int(tokens[0, 0])
            before.append(Before(sequence.num_computed, list(sequence.token_ids), first))
            solo.round([sequence], num_steps)
    return groups, before


def expected(name: str, num_steps: int, L: int, tokens: list[int]) -> list[list[int]]:  # noqa: N803
    """Return the positions of a round's forwards. `tokens` end with the bonus token, whose position is L."""
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
            assert rows[0][0] == [sequence.first_draft]


@pytest.mark.parametrize(
    ("name", "num_steps"),
    thinned(
        itertools.product([*NAMES, *OF_FAMILIES], [1, 3]),
        lambda i, name, _: i % 4 in (0, 3) and (name in NAMES or name == STREAM_MTP),
    ),
)
def test_each_forward_has_the_right_positions(name: str, num_steps: int, make_solo: MakeSolo) -> None:
    check_positions(name, make_solo(name), num_steps)


@pytest.mark.parametrize("name", [*NAMES, STREAM_MTP])
def test_a_forward_one_position_off_is_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    solo = make_solo(name)
    module = {"standalone": standalone, "frozen-kv-mtp": frozen_kv}.get(name, shifted)

    class OneOff(ForwardBatch):
        @classmethod
        def uniform(cls, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> ForwardBatch:
            is_off = name == "frozen-kv-mtp" or positions.shape[1] == 1
            return ForwardBatch.uniform(input_ids, positions + is_off, *rest)

    monkeypatch.setattr(module, "ForwardBatch", OneOff)
    with caught():
        check_positions(name, solo, 3)


def test_frozen_forwards_see_only_the_targets_rows(make_solo: MakeSolo) -> None:
    solo = make_solo("frozen-kv-mtp")
    with spied(solo.drafter) as log:
        sequence = solo.start(PROMPT, params(40))
        solo.round([sequence], 4)
    assert [each.seq_lens for each in log] == [(7,)] * 4


# --- the KV after rounds --------


def check_kv(name: str, solo: Solo, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check that draft KV and state equal a recompute after each round, whatever the round accepts. Every slot beyond
    the sequence's tokens is overwritten before the round. Return how many drafts each round accepted."""
    truth = truth_of(solo.engine.model_dir)
    coach(monkeypatch, {3: truth}, lambda _, position: position % 7 not in (2, 3))
    sequence = solo.start(PROMPT, ASKED)
    for num_steps in (1, 3, 5, 2, 4, 1, 5):
        solo.poison(sequence)
        solo.round([sequence], min(num_steps, solo.drafter.shape.num_steps))
        assert sequence.token_ids == truth[: len(sequence.token_ids)]
        check_against_scratch(solo, sequence)
    return sequence.num_accepted


@pytest.mark.parametrize(  # the tests of S4 compare the others with a recompute
    "name", thinned(ALL, lambda _, name: name in ("mtp-deepseek", "mtp-mimo", *OF_FAMILIES) and name not in ALIKE)
)
def test_kv_after_rounds_equals_a_recompute(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = check_kv(name, make_solo(name), monkeypatch)
    assert 0 in accepted and max(accepted) > 1 and 0 < sum(accepted) < 21, accepted


@pytest.mark.parametrize("name", thinned(SHIFTED, lambda _, name: name not in OF_FAMILIES or name == STREAM_MTP))
def test_rows_kept_from_drafting_are_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: extend computes only the accepted row. Rows before it keep the KV of drafting, which was made from
    the head's own states instead of the target's."""
    solo = make_solo(name)

    def observe(self: Any, rows: RoundRows, hidden: Any, targets: Any, num_accepted: torch.Tensor) -> DraftState:
        at = num_accepted.unsqueeze(1)
        position = rows.lengths.unsqueeze(1) + at
        states = hidden.gather(1, at.unsqueeze(2).expand(-1, -1, hidden.shape[2])).squeeze(1)
        end = position.squeeze(1) + 1
        recurrent = self._forward(rows, targets.gather(1, at), position, end, states, is_extend=True)
        return self._state(recurrent, rows.after(targets, num_accepted))

    monkeypatch.setattr(shifted.ShiftedDrafter, "observe", observe)
    with caught():
        check_kv(name, solo, monkeypatch)


def test_a_slot_left_empty_after_full_acceptance_is_caught(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: a standalone draft does not run its last proposal, so its slot is empty if all are accepted."""
    solo = make_solo("standalone")
    propose = standalone.StandaloneDrafter.propose

    def hasty(self: Any, rows: RoundRows, shape: DraftShape) -> Drafts:
        drafts = propose(self, rows, shape)
        kv = self.pools.kv
        page_size = kv.shape[4]
        for length, table in zip(rows.lengths.tolist(), rows.block_table, strict=True):
            slot = length + shape.num_steps
            kv[:, table[slot // page_size], :, :, slot % page_size] = POISON
        return drafts

    monkeypatch.setattr(standalone.StandaloneDrafter, "propose", hasty)
    with caught():
        check_kv("standalone", solo, monkeypatch)
