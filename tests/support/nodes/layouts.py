"""Hidden states of the drafters that exist, for tests of the handoff that load none of them.

tests/engine/drafters/test_family.py compares this table with what the drafters say themselves.
"""

from __future__ import annotations

from typing import Any

from baton.metadata.handoff.schema.hidden_layout import HiddenLayout

SOURCES: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {},
    "standalone": {},
    "eagle": {"extend": "handoff", "recurrent": "draft"},
    "eagle3": {"extend": "aux", "recurrent": "draft", "num_aux": 3},
    "mtp": {"extend": "handoff", "recurrent": "draft"},
    "frozen-kv-mtp": {"extend": "final", "recurrent": "final"},
}
LOOKAHEAD = {"eagle": 1, "eagle3": 1, "mtp": 1}
WITH_DRAFT_POOL = ("standalone", "eagle", "eagle3", "mtp")


def make_layout(algorithm: str, **numbers: Any) -> HiddenLayout:
    """Return the layout of a drafter whose target has 64 and whose draft has 32 numbers, unless told otherwise."""
    return HiddenLayout(
        algorithm=algorithm, **{"target_hidden_size": 64, "draft_hidden_size": 32, **SOURCES[algorithm], **numbers}
    )
