"""The state of a sequence between rounds equals a recompute of its tokens, whatever happened to the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from solo import Running, Solo
from torch import Tensor

from baton.engine.drafters.base import DraftState
from baton.engine.work import MAX_MISSED

BOUND = 1e-4  # of KV, and of states in relation to the largest number


def check_against_scratch(solo: Solo, sequence: Running) -> None:
    """Check the target KV of all tokens. If the drafter has seen all of them, check its KV and state too."""
    scratch = solo.from_scratch(sequence)
    _check_rows(solo.target_kv(sequence), solo.target_kv(scratch))
    _check_further(solo, sequence, scratch)
    if sequence.num_missed == 0:  # else the next round that drafts begins by catching up
        check_state(solo.draft(sequence), solo.draft(scratch))
        ours, theirs = solo.draft_kv(sequence), solo.draft_kv(scratch)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            _check_rows(ours, theirs)
        _check_further(solo, sequence, scratch, of_draft=True)
    solo.rounds.release(scratch)
    solo.engine.pool.release(scratch.pages + ([] if scratch.tail is None else scratch.tail.own))


def _check_further(solo: Solo, sequence: Running, scratch: Running, *, of_draft: bool = False) -> None:
    both = (solo.further_rows(each, of_draft=of_draft) for each in (sequence, scratch))
    for ours, theirs in zip(*both, strict=True):
        _check_rows(ours, theirs)


def _check_rows(ours: Tensor, theirs: Tensor) -> None:
    """Compare [num_layers, num_planes, num_heads, num_rows, width]. A pool of entries has no rows before the first
    window is whole."""
    if ours.numel():
        assert float((ours - theirs).abs().max()) < BOUND, (ours - theirs).abs().amax((0, 1, 2, 4))


def check_state(ours: DraftState, theirs: DraftState) -> None:
    """Check that both states have the same fields, equal except for the last bits."""
    fields, anew = dict(ours.present()), dict(theirs.present())
    assert fields.keys() == anew.keys()
    for name, value in fields.items():
        if value.is_floating_point():
            assert float((value - anew[name]).abs().max()) < BOUND * float(anew[name].abs().max()), name
        else:
            assert value.tolist() == anew[name].tolist(), name


class Outsiders:
    """The bytes of all state of sequences that take no part in a round, and of the padding sequence. A state that was
    that of a recompute still is if no byte changes."""

    def __init__(self, solo: Solo, sequences: Sequence[Running]) -> None:
        self._solo, self._sequences = solo, sequences
        self._before = self._bytes()

    def check(self) -> None:
        for before, after in zip(self._before, self._bytes(), strict=True):
            assert torch.equal(before, after)

    def _bytes(self) -> list[torch.Tensor]:
        solo, slots, rows = self._solo, self._solo.executor.slots, [each.slot for each in self._sequences]
        columns = [slots._top_p, slots._prompt_mask, slots._output_counts, slots._bias]
        columns += [value for _, value in slots._draft.present()]
        columns += [kept.unflatten(0, (-1, MAX_MISSED + 1)) for kept in slots._missed]
        mine = [column[rows].clone() for column in columns if column is not None]
        both = [column[:, [*rows, slots.padding]].clone() for column in (slots._ints, slots._floats)]
        tables = [[page for each in self._sequences for page in solo._table(kv, each)] for kv in solo.engine.kvs]
        return mine + both + [kv[:, pages].clone() for kv, pages in zip(solo.engine.kvs, tables, strict=True)]
