"""The state of a sequence between rounds equals a recompute of its tokens, whatever happened to the sequence."""

from __future__ import annotations

from solo import Running, Solo
from torch import Tensor

from baton.engine.drafters.base import DraftState

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
    solo.engine.pool.release(scratch.pages)


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
