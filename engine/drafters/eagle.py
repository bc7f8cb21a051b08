"""EAGLE: a head that predicts the target's next hidden state. shifted.py drafts with it."""

from __future__ import annotations

from ..models.head_file import check_state_width, read_head, without_model
from ..models.heads import load_eagle
from .family import Family, Speculation, Wanted
from .shifted import shifted_speculation


def _recognises(names: frozenset[str]) -> bool:
    """An EAGLE-3 head also has `fc`, but a norm for its states in its layer."""
    bare = without_model(names)
    return "fc.weight" in bare and not any(
        name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in bare
    )


def _read(wanted: Wanted) -> Speculation:
    head = read_head(wanted.draft_dir, wanted.target)
    check_state_width(head, wanted.target)
    hidden = wanted.layout(head.config, extend="handoff", recurrent="draft")
    return shifted_speculation(wanted, head, hidden, load_eagle)


FAMILY = Family(name="eagle", read=_read, drafts_trees=True, recognises=_recognises)
