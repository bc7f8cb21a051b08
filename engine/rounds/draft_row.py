"""A drafter's state in the metadata row of a handoff, with which the first round of the decode node drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...metadata.handoff.schema.buffers import MetadataBuffers
from ...metadata.wire.node_info import HandoffSchema
from ..drafters.base import Drafter, DraftState

_FIELDS = {"tokens": "topk_index", "scores": "topk_score", "hidden": "recurrent_hidden", "rows": "target_rows"}


def set_draft(row: MetadataBuffers, draft: DraftState) -> None:
    """Write the state of one sequence into the fields that the schema has. A field without a value, or a value
    without a field, is our bug. Raises ValueError for a state of another width or dtype than the schema's: nothing is
    cut or cast."""
    values = dict(draft.present())
    for name, field in _FIELDS.items():
        value = values.get(name)
        assert (field in row) == (value is not None), (field, value)
        if value is not None:
            dtype = torch.int32 if name == "tokens" else value.dtype
            row.set(field, value.reshape(-1).to("cpu", dtype))


def pack_draft(schema: HandoffSchema, draft: DraftState) -> bytes:
    """Return a metadata row of one sequence with this draft state and no first token, in the bytes of the schema."""
    row = MetadataBuffers(schema)
    set_draft(row, draft)
    return row.pack()


def get_draft(row: MetadataBuffers, drafter: Drafter, token_ids: Sequence[int]) -> DraftState:
    """Return the state that `set_draft` wrote, one row on the CPU. `token_ids`: the whole sequence, the first generated
    token included."""
    draft = DraftState(**{name: torch.zeros_like(each, device="cpu") for name, each in drafter.allocate(1).present()})
    for name, value in draft.present():
        if name == "recent":
            known = torch.tensor(list(token_ids[-value.shape[1] :]))
            value[0, value.shape[1] - len(known) :] = known
        else:
            value.copy_(row.get(_FIELDS[name]).view(value.shape))
    return draft
