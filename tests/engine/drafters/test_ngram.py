"""Which text is asked, in which order. The lookups themselves: test_suffixes.py."""

from __future__ import annotations

import pytest
from layouts import make_layout

from baton.engine.draft_shape import DraftShape
from baton.engine.drafters.ngram import NgramDrafter


@pytest.fixture
def drafter() -> NgramDrafter:
    return NgramDrafter(make_layout("ngram"), DraftShape(4))


def finish(drafter: NgramDrafter, token_ids: list[int], salt: str = "") -> None:
    drafter.lookup(9, token_ids, salt, 1)
    drafter.forget(9, token_ids, salt)


def test_the_own_text_comes_first(drafter: NgramDrafter) -> None:
    finish(drafter, [1, 2, 3, 9, 9, 9, 9])
    assert drafter.lookup(0, [1, 2, 3, 4, 5, 1, 2, 3], "", 4) == [4, 5, 1, 2]


def test_finished_requests_come_before_short_matches(drafter: NgramDrafter) -> None:
    own = [7, 3, 4, 1, 2, 3]  # a 3 stood there before, followed by a 4
    assert drafter.lookup(0, own, "", 2) == [4, 1]
    finish(drafter, [1, 2, 3, 8, 8])
    assert drafter.lookup(0, own, "", 2) == [8, 8]
    assert drafter.lookup(1, own, "another tenant", 2) == [4, 1]


def test_a_finished_text_is_found_under_its_own_salt_alone(drafter: NgramDrafter) -> None:
    finish(drafter, [1, 2, 3, 8, 8], "one tenant")
    own = [7, 3, 4, 1, 2, 3]
    assert drafter.lookup(0, own, "one tenant", 2) == [8, 8]
    for slot, salt in enumerate(("", "another tenant"), start=1):
        assert drafter.lookup(slot, own, salt, 2) == [4, 1], salt


def test_nothing_found_repeats_the_last_token(drafter: NgramDrafter) -> None:
    assert drafter.lookup(0, [5], "", 3) == [5, 5, 5]
    assert drafter.lookup(1, [1, 2, 1], "", 4) == [2, 1, 1, 1]


def test_a_slot_starts_anew(drafter: NgramDrafter) -> None:
    drafter.lookup(0, [1, 2, 3, 4, 1, 2, 3], "", 1)
    drafter.forget(0, [1, 2, 3, 4, 1, 2, 3], "a")
    assert drafter.lookup(0, [6, 1, 2, 3], "b", 2) == [3, 3]


def test_a_sequence_grows(drafter: NgramDrafter) -> None:
    text = [1, 2, 3, 4]
    for token in [5, 1, 2, 3, 4]:
        text.append(token)
        drafter.lookup(0, text, "", 2)
    assert drafter.lookup(0, text, "", 3) == [5, 1, 2]
