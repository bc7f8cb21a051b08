"""A drafter's state in the metadata row of a handoff: what prefill hands over so that decode's first round drafts."""

from __future__ import annotations

from ..metadata.buffers import MetadataBuffers
from .drafters.base import DraftState


def set_draft(row: MetadataBuffers, draft: DraftState) -> None:
    """Writes what the schema has fields for; a field without a value, or a value without a field, is our bug."""
    for name, value in (("topk_index", draft.token), ("recurrent_hidden", draft.hidden)):
        assert (name in row) == (value is not None), (name, value)
        if value is not None:
            field = row.get(name)
            row.set(name, value.reshape(field.shape).to("cpu", field.dtype))


def get_draft(row: MetadataBuffers) -> DraftState:
    """The inverse; tensors on the CPU, copies."""
    token = row.get("topk_index")[0].long() if "topk_index" in row else None
    hidden = row.get("recurrent_hidden").clone() if "recurrent_hidden" in row else None
    return DraftState(token, hidden)
