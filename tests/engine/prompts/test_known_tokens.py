"""A rank knows the tokens of a row and some around them. Reading others is an error."""

from __future__ import annotations

import pytest

from baton.engine.prompts.known_tokens import MARGIN, Around, KnownTokens
from baton.engine.work import BatchRow

TEXT = list(range(1000, 1500))
ROW = BatchRow(TEXT[200:250], 200, [])


def around(row: BatchRow, text: list[int] = TEXT) -> KnownTokens:
    found = Around.of(row, text).text(row)
    assert isinstance(found, KnownTokens)
    return found


def test_tokens_around_a_row_are_those_of_the_text() -> None:
    text = around(ROW)
    assert len(text) == 500
    first, last = 200 - MARGIN, 250 + MARGIN
    assert (text[first], text[last - 1]) == (TEXT[first], TEXT[last - 1])
    for start, stop in ((200, 250), (first, last), (230, 251), (260, 260), (400, 300)):
        assert text[start:stop] == TEXT[start:stop]
    for place in (first - 1, last, -1):
        with pytest.raises(AssertionError):
            text[place]
    for start, stop in ((first - 1, 210), (249, last + 1), (0, 10)):
        with pytest.raises(AssertionError):
            text[start:stop]
    with pytest.raises(IndexError):
        text[500]


def test_the_end_of_a_text_is_read_from_its_end() -> None:
    text = around(BatchRow(TEXT[440:499], 440, []))
    assert (text[-1], text[-3:], text[499:502]) == (TEXT[-1], TEXT[-3:], TEXT[499:])
    before = text[:-1]
    assert (len(before), before[-2:]) == (499, TEXT[497:499])
    with pytest.raises(AssertionError):
        before[:-1][0]


def test_a_short_text_is_known_whole() -> None:
    row = BatchRow(TEXT[40:50], 40, [])
    assert Around.of(row, TEXT[:60]).text(row) == TEXT[:60]
    begin = around(BatchRow(TEXT[:50], 0, []))
    assert begin[:50] == TEXT[:50] and len(begin) == 500


def test_a_row_that_is_not_of_the_text_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Around.of(BatchRow([1, 2], 3, []), TEXT)


@pytest.mark.parametrize(("position", "text_len"), [(1, 500), (200, 120), (495, 500)])
def test_a_text_that_cannot_be_is_refused(position: int, text_len: int) -> None:
    with pytest.raises(ValueError, match="of a text of"):
        Around([1, 2], [3] * 8, text_len).text(BatchRow([7] * 100, position, []))
