"""Which text is asked, in which order. The lookups themselves: test_suffixes.py."""

from __future__ import annotations

import pytest
from layouts import make_layout

from baton.engine.drafters.ngram import NgramDrafter
from baton.engine.pace.draft_length import DraftShape


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


def test_a_replay_counts_the_drafts_that_would_have_been_right(drafter: NgramDrafter) -> None:
    """It stands where rounds would stand: after each accepted run and the token that corrects it."""
    prompt, came = [1, 2, 3, 4, 5, 6, 9], [1, 2, 3, 4, 5, 6, 7, 1, 2]
    drafter.lookup(0, prompt, "", 4)
    # 1 is not found; after it 2 3 4 5 are right and 6 corrects nothing; then 9, 1, 2 are proposed, and 7 comes
    place, expected = len(prompt), []
    twin = NgramDrafter(make_layout("ngram"), DraftShape(4))
    text = prompt + came
    while place < len(text):
        drafts = twin.lookup(0, text[:place], "", min(4, len(text) - place))
        right = next((i for i, (a, b) in enumerate(zip(drafts, text[place:], strict=False)) if a != b), len(drafts))
        expected.append((right, min(right + 1, 4, len(text) - place)))
        place += right + 1
    num_right, num_tries = drafter.replay(0, text, "", 4, 100)
    assert num_right == sum(right for right, _ in expected) > 4
    assert abs(num_tries - sum(tries for _, tries in expected)) <= 1  # nothing found: no draft, or the last token again
    assert drafter.replay(0, text, "", 4, 100) == (0, 0), "each token is looked at once"


def test_a_replay_is_short_and_leaves_later_lookups_as_they_are(drafter: NgramDrafter) -> None:
    text = [1, 2, 3, 4] * 50
    right, tries = drafter.replay(0, text, "", 4, 6)
    assert (right, tries) == (8, 8), "two drafts of four"
    assert drafter.replay(0, text, "another", 4, 6)[1] <= 8
    fresh = NgramDrafter(make_layout("ngram"), DraftShape(4))
    assert drafter.lookup(0, text, "", 4) == fresh.lookup(0, text, "", 4)


@pytest.mark.parametrize("text", [[], [5], [5, 5]])
def test_a_replay_of_hardly_any_text(drafter: NgramDrafter, text: list[int]) -> None:
    right, tries = drafter.replay(0, text, "", 4, 6)
    assert 0 <= right <= tries <= 1
