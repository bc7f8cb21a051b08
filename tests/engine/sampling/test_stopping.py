"""The end of a choice: stop ids, max_tokens and the context, and what the totals say."""

from __future__ import annotations

import pytest

from baton.engine.sampling.state import SamplingState
from baton.engine.sampling.stopping import ended
from baton.metadata.wire.request import SamplingParams

PROMPT = [1, 2, 3]


def after(output: list[int], context_len: int = 100, **params: object) -> tuple[str, int | None] | None:
    """Return reason and stop id if the last token of `output` ends the choice."""
    wanted = SamplingParams(**({"max_tokens": 4} | params))  # type: ignore[arg-type]
    end = ended(SamplingState(wanted, PROMPT, output, vocab_size=50), output[-1], context_len, 2)
    if end is None:
        return None
    assert (end.num_prompt, end.num_generated, end.num_cached) == (len(PROMPT), len(output), 2)
    return end.reason, end.stop_id


@pytest.mark.parametrize(
    ("output", "context_len", "params", "expected"),
    [
        ([9], 100, {}, None),
        ([9, 9, 9], 100, {}, None),
        ([9, 9, 9, 9], 100, {}, ("length", None)),
        ([9, 9], 5, {}, ("length", None)),
        ([9, 9], 6, {}, None),
        ([9, 7], 100, {"stop_ids": (5, 7)}, ("stop", 7)),
        ([7, 9], 100, {"stop_ids": (5, 7)}, None),
        ([9, 9, 9, 7], 100, {"stop_ids": (7,)}, ("stop", 7)),
        ([9, 7], 5, {"stop_ids": (7,)}, ("stop", 7)),
    ],
    ids=str,
)
def test_a_choice_ends_at_its_last_token(
    output: list[int], context_len: int, params: dict[str, object], expected: tuple[str, int | None] | None
) -> None:
    assert after(output, context_len, **params) == expected
