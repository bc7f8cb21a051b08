"""What a sequence must have between rounds, whatever happened to it: what a recompute of its tokens gives."""

from __future__ import annotations

from solo import Running, Solo

from baton.engine.drafters.base import DraftState

BOUND = 1e-4  # of KV, and of states in relation to the largest number


def check_against_scratch(solo: Solo, sequence: Running) -> None:
    """Target KV of all tokens; and the drafter's KV and state, once it has seen all of them."""
    scratch = solo.from_scratch(sequence)
    assert float((solo.target_kv(sequence) - solo.target_kv(scratch)).abs().max()) < BOUND
    if sequence.num_missed == 0:  # else the next round that drafts begins by catching up
        check_state(solo.draft(sequence), solo.draft(scratch))
        ours, theirs = solo.draft_kv(sequence), solo.draft_kv(scratch)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert float((ours - theirs).abs().max()) < BOUND, (ours - theirs).abs().amax((0, 1, 2, 4))
    solo.rounds.release(scratch)
    solo.engine.pool.release(scratch.pages)


def check_state(ours: DraftState, theirs: DraftState) -> None:
    """The same fields, and in each the same but for the last bits."""
    fields, anew = dict(ours.present()), dict(theirs.present())
    assert fields.keys() == anew.keys()
    for name, value in fields.items():
        if value.is_floating_point():
            assert float((value - anew[name]).abs().max()) < BOUND * float(anew[name].abs().max()), name
        else:
            assert value.tolist() == anew[name].tolist(), name
