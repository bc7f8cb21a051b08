"""A drafter's state in the metadata row of a handoff: what prefill hands over so that decode's first round drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..metadata.handoff.buffers import MetadataBuffers
from .drafters.base import Drafter, DraftState

_FIELDS = {"tokens": "topk_index", "scores": "topk_score", "hidden": "recurrent_hidden", "rows": "target_rows"}


def set_draft(row: MetadataBuffers, draft: DraftState) -> None:
    """Writes what the schema has fields for, of one sequence; a field without a value, or a value without a field, is
    our bug. Raises ValueError for a state of another width or dtype than the schema's: it is neither cut nor cast."""
    values = dict(draft.present())
    for name, field in _FIELDS.items():
        value = values.get(name)
        assert (field in row) == (value is not None), (field, value)
        if value is not None:
            dtype = torch.int32 if name == "tokens" else value.dtype
            row.set(field, value.reshape(-1).to("cpu", dtype))


def get_draft(row: MetadataBuffers, drafter: Drafter, token_ids: Sequence[int]) -> DraftState:
    """The inverse, one row on the CPU; `token_ids` of the sequence, the first generated token included."""
    draft = DraftState(**{name: torch.zeros_like(each, device="cpu") for name, each in drafter.allocate(1).present()})
    for name, value in draft.present():
        if name == "recent":
            known = torch.tensor(list(token_ids[-value.shape[1] :]))
            value[0, value.shape[1] - len(known) :] = known
        else:
            value.copy_(row.get(_FIELDS[name]).view(value.shape))
    return draft
