"""Prompt lookup against a plain search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.drafters.ngram import MAX_NGRAM, lookup


def plain_lookup(ids: list[int], num_steps: int) -> list[int]:
    for length in range(min(MAX_NGRAM, len(ids) - 1), 0, -1):
        for at in range(len(ids) - length - 1, -1, -1):
            if ids[at : at + length] == ids[-length:]:
                following = ids[at + length : at + length + num_steps]
                return following + [ids[-1]] * (num_steps - len(following))
    return [ids[-1]] * num_steps


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 6))
def test_equals_a_plain_search(ids: list[int], num_steps: int) -> None:
    assert lookup(ids, num_steps) == plain_lookup(ids, num_steps)


@given(st.lists(st.sampled_from([0, 1, 256, 65536, 65537]), min_size=1, max_size=30), st.integers(0, 4))
def test_bytes_of_neighbours_are_no_token(ids: list[int], num_steps: int) -> None:
    assert lookup(ids, num_steps) == plain_lookup(ids, num_steps)
