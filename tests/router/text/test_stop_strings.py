"""Stop strings do not depend on how text is cut into tokens."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.text.stop_strings import StopStrings

LETTERS = "ab\n"
texts = st.text(LETTERS, max_size=24)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Look for the stop strings character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(text=texts, stops=stop_lists, places=st.lists(st.integers(0, 30), max_size=20), include=st.booleans())
@settings(max_examples=1000, deadline=None)
def test_however_the_text_is_split_the_output_is_the_same(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    watch = StopStrings(stops, include=include)
    shown = ""
    for piece in cut(text, places):
        shown += watch.feed(piece)
        assert text.startswith(shown), "text was shown that a stop string takes back"
        if watch.found is not None:
            break
    if watch.found is None:
        shown += watch.flush()
    assert (shown, watch.found) == reference(text, stops, include)


@given(text=texts, stops=stop_lists)
@settings(max_examples=300, deadline=None)
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops, include=False)
    shown = ""
    for character in text:
        shown += watch.feed(character)
        if watch.found is not None:
            return
        held = text[len(shown) :][: len(watch._held)]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_before_min_tokens_nothing_stops() -> None:
    watch = StopStrings(["END"], include=False)
    assert watch.feed("xEND", may_stop=False) == "xEND"
    assert watch.feed("yE", may_stop=False) == "y"
    assert watch.feed("NDz") == ""
    assert watch.found == "END"


def test_without_stops_nothing_is_held() -> None:
    watch = StopStrings([], include=False)
    assert watch.feed("abc") == "abc"
    assert watch.flush() == ""
