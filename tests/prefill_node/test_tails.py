"""Division of long prompts."""

from __future__ import annotations

import pytest

from baton.prefill_node.tails import LEAST_TAIL, PromptTails, num_before_tail

CHUNK = 8192


@pytest.mark.parametrize(
    ("num_left", "before"),
    [(1, None), (4095, None), (4096, 3072), (4607, 3072), (4608, 4096), (8192, 7168), (8193, None)],
)
def test_long_prompts_that_fit_in_a_chunk_are_divided(num_left: int, before: int | None) -> None:
    assert num_before_tail(num_left, CHUNK) == before
    assert before is None or LEAST_TAIL <= num_left - before < LEAST_TAIL + 1024


def test_a_tail_follows_what_is_before_it_and_nothing_else() -> None:
    tails = PromptTails[str](CHUNK)
    assert tails.budget("a", 8192, is_alone=True) == 7168
    assert tails.budget("a", 1024, is_alone=False) == 1024, "others wait, but not in this chunk"
    assert tails.budget("b", 8192, is_alone=False) == CHUNK
    assert tails.budget("c", 8192, is_alone=True) == 7168
    assert tails.budget("d", 8192, is_alone=True) == 7168, "c is gone"
    assert tails.budget("d", 8192, is_alone=True) == CHUNK, "the chunk before the tail failed, so all is left"
    assert tails.budget("e", 20000, is_alone=True) == CHUNK
    assert tails.budget("e", 3616, is_alone=True) == CHUNK
