"""Token counts of answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from baton.router.http.generation.answer_format import usage_of

REQUEST: Any = SimpleNamespace(
    prompt_ids=[7, 8], num_generated=3, num_cached=None, num_rounds=2, num_accepted=1, num_drafted=4
)


def test_usage_counts_a_shared_prompt_once() -> None:
    usage = usage_of([REQUEST])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 3, 5)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.speculation is not None
    assert usage.speculation.accept_length == 1.5
