"""The metadata row brings decode exactly the draft state that prefill had, for prompts of every length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters import ALIKE, ALL, settings, target_of
from heads import SIX_LAYERS
from node_pair import params
from solo import Solo
from thinned import thinned

from baton.engine.drafters.base import get_draft, set_draft
from baton.metadata.handoff.schema.buffers import MetadataBuffers

PROMPTS = [[17, 4, 250, 33, 99, 8, 301, 12, 76][:num] for num in range(1, 10)]


@pytest.mark.parametrize("name", thinned([*ALL, SIX_LAYERS], lambda _, name: name not in ALIKE))
def test_a_draft_state_comes_out_of_its_row_as_it_went_in(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Also when a prompt is shorter than the rows and tokens that travel: zeros stand before the first of them."""
    model = target_of(name, checkpoint)
    solo = Solo(model, num_slots=1, num_pages=80, **settings(name, model, tmp_path))
    for prompt in PROMPTS:
        sequence = solo.start(prompt, params(2))
        sent, row = solo.draft(sequence), MetadataBuffers(solo.engine.schema)
        set_draft(row, sent)
        arrived = MetadataBuffers(solo.engine.schema)
        arrived.unpack(row.pack())
        got = get_draft(arrived, solo.drafter, sequence.token_ids)
        assert [field for field, _ in got.present()] == [field for field, _ in sent.present()]
        for (field, ours), (_, theirs) in zip(got.present(), sent.present(), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), (field, prompt, ours, theirs)
        solo.rounds.release(sequence)


def test_a_state_with_a_field_too_many_or_too_few_is_our_bug(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = target_of("eagle", checkpoint)
    solo = Solo(model, num_pages=20, **settings("eagle", model, tmp_path))
    draft, row = solo.draft(solo.start([1, 2], params(2))), MetadataBuffers(solo.engine.schema)
    for wrong in (replace(draft, hidden=None), replace(draft, scores=torch.zeros(1, 1))):
        with pytest.raises(AssertionError):
            set_draft(row, wrong)


def test_a_state_of_another_width_or_dtype_is_neither_cut_nor_cast(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of("eagle", checkpoint)
    solo = Solo(model, num_pages=20, **settings("eagle", model, tmp_path))
    draft, row = solo.draft(solo.start([1, 2], params(2))), MetadataBuffers(solo.engine.schema)
    assert draft.hidden is not None
    for wrong in (draft.hidden[:, 1:], draft.hidden.double()):
        with pytest.raises(ValueError, match="recurrent_hidden: hidden state of"):
            set_draft(row, replace(draft, hidden=wrong))
