"""A drafter's state in the metadata row of a handoff: what prefill hands over so that decode's first round drafts."""

from __future__ import annotations

import torch

from ..metadata.buffers import MetadataBuffers
from ..metadata.hidden_layout import HiddenLayout
from .drafters.base import DraftState

_FIELDS = ("topk_index", "recurrent_hidden", "target_rows")  # in the order of DraftState's


def set_draft(row: MetadataBuffers, draft: DraftState) -> None:
    """Writes what the schema has fields for; a field without a value, or a value without a field, is our bug. Raises
    ValueError for a state of another width or dtype than the schema's: it is neither cut nor cast."""
    for name, value in zip(_FIELDS, (draft.tokens, draft.hidden, draft.rows), strict=True):
        assert (name in row) == (value is not None), (name, value)
        if value is not None:
            dtype = torch.int32 if name == "topk_index" else value.dtype
            row.set(name, value.reshape(-1).to("cpu", dtype))


def get_draft(row: MetadataBuffers, hidden: HiddenLayout) -> DraftState:
    """The inverse; tensors on the CPU, copies."""
    tokens, recurrent, rows = (row.get(name).clone() if name in row else None for name in _FIELDS)
    return DraftState(
        None if tokens is None else tokens.long(),
        recurrent,
        None if rows is None else rows.view(hidden.num_target_rows, -1),
    )
