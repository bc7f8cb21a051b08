"""Pages that a request needs, as nodes reserve them and the router counts them."""

from __future__ import annotations

import pytest

from baton.metadata.handoff.schema.schema import decode_len, pages_of, prefill_pages, shared_pages


def test_tokens_fill_pages() -> None:
    assert [pages_of(num_tokens, 4) for num_tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("num_tokens", "lookahead", "shared"), [(8, 0, 2), (8, 1, 1), (9, 1, 2), (8, 4, 1), (8, 5, 0), (2, 5, 0)]
)
def test_pages_that_depend_on_the_sampled_token_are_not_shared(num_tokens: int, lookahead: int, shared: int) -> None:
    assert shared_pages(num_tokens, 4, lookahead) == shared


def test_every_further_choice_adds_its_own_pages() -> None:
    assert prefill_pages(8, 1, 4, 1) == 2
    assert prefill_pages(8, 3, 4, 1) == 2 + 2 * 1
    assert prefill_pages(8, 3, 4, 0) == 2  # nothing depends on the sampled token
    assert prefill_pages(8, 0, 4, 1) == 2  # a request without a ticket


@pytest.mark.parametrize(("num_tokens", "length"), [(5, 11), (95, 100), (100, 100), (101, 101)])
def test_a_decode_node_reserves_two_rounds_within_its_context(num_tokens: int, length: int) -> None:
    assert decode_len(num_tokens, 6, 100) == length
