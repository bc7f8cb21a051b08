"""The deltas of a text join to the text that decoding all ids at once gives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import num_examples

from baton.router.text.detokenizer import MAX_HELD, make_detokenizer
from baton.router.text.stop_strings import StopStrings
from baton.router.text.tokenizer import TextTokenizer

from ..fake_nodes import make_tokenizer

BYTE_LEVEL = TextTokenizer(make_tokenizer("byte"))
FALLBACK = TextTokenizer(make_tokenizer("sentencepiece"))


def deltas(tokenizer: TextTokenizer, ids: list[int], prompt: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special=skip_special)
    return [*(detokenizer.step(token_id) for token_id in ids), detokenizer.flush()]


def test_byte_level_tokenizers_are_recognized() -> None:
    assert BYTE_LEVEL.is_byte_level
    assert not FALLBACK.is_byte_level


@given(ids=st.lists(st.integers(0, 419), max_size=60), skip_special=st.booleans())
@settings(max_examples=num_examples(400), deadline=None)
def test_the_deltas_of_any_ids_join_to_the_whole(ids: list[int], skip_special: bool) -> None:
    """This also holds for bytes that are not UTF-8, and for ids beyond the vocabulary."""
    parts = deltas(BYTE_LEVEL, ids, [], skip_special=skip_special)
    assert "".join(parts) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip_special)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK], ids=["byte", "fallback"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), max_size=40))
@settings(max_examples=num_examples(200), deadline=None)
def test_the_deltas_of_any_text_join_to_the_whole(tokenizer: TextTokenizer, text: str) -> None:
    prompt = tokenizer.inner.encode("hello").ids
    whole = tokenizer.inner.encode("hello " + text).ids
    ids = whole[len(prompt) :]
    if whole[: len(prompt)] != prompt:
        return
    parts = deltas(tokenizer, ids, prompt)
    assert tokenizer.decode(prompt) + "".join(parts) == tokenizer.decode(whole)
    assert "\ufffd" not in "".join(parts), "a character was split"


@given(ids=st.lists(st.integers(0, 419), max_size=60))
@settings(max_examples=num_examples(200), deadline=None)
def test_bytes_that_are_no_text_end_no_stream(ids: list[int]) -> None:
    """A vocabulary with tokens for single bytes shows all that follows them."""
    ids = [token_id % FALLBACK.inner.get_vocab_size() for token_id in ids]
    end = FALLBACK.inner.encode(" and then").ids
    assert "".join(deltas(FALLBACK, ids + end, [])).endswith("then")


def test_no_delta_splits_a_character() -> None:
    ids = BYTE_LEVEL.inner.encode("😀😀 ✓").ids
    assert len(ids) > 8  # one token a byte
    parts = deltas(BYTE_LEVEL, ids, [])
    assert [part for part in parts if part] == ["😀", "😀", " ", "✓"]


def test_an_incomplete_character_at_the_end_is_shown_as_a_replacement() -> None:
    ids = BYTE_LEVEL.inner.encode("a😀").ids[:-1]
    assert "".join(deltas(BYTE_LEVEL, ids, [])) == "a\ufffd"
    ids = FALLBACK.inner.encode("a😀").ids[:-1]
    assert "".join(deltas(FALLBACK, ids, FALLBACK.inner.encode("x").ids)).endswith("\ufffd")


def test_holding_back_is_bounded() -> None:
    """Bytes that never become a character are shown after a while."""
    stray = FALLBACK.inner.token_to_id("<0x9F>")
    detokenizer = make_detokenizer(FALLBACK, [], skip_special=True)
    shown = [detokenizer.step(stray) for _ in range(3 * MAX_HELD)]
    assert sum(map(len, shown)) >= 2 * MAX_HELD


def test_leading_space_is_kept_after_a_prompt() -> None:
    prompt, ids = FALLBACK.inner.encode("the").ids, FALLBACK.inner.encode("quick").ids
    assert "".join(deltas(FALLBACK, ids, prompt)) == " quick"


def test_special_tokens_are_skipped_on_request() -> None:
    end = BYTE_LEVEL.inner.token_to_id("<|im_end|>")
    assert deltas(BYTE_LEVEL, [end], [], skip_special=True) == ["", ""]
    assert deltas(BYTE_LEVEL, [end], [], skip_special=False) == ["<|im_end|>", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK], ids=["byte", "fallback"])
def test_special_tokens_that_a_parser_reads_are_shown(tokenizer: TextTokenizer) -> None:
    by_text = tokenizer.special_by_text
    word = tokenizer.inner.encode("hello").ids
    ids = [*word, by_text["<s>"], *word, by_text["</s>"], *word]
    shown: dict[frozenset[str], str] = {}
    for markers in (frozenset[str](), frozenset({"<s>", "unknown"}), frozenset({"<s>", "</s>"})):
        detokenizer = make_detokenizer(tokenizer, [by_text["<s>"]], skip_special=True, markers=markers)
        text = "".join(map(detokenizer.step, ids)) + detokenizer.flush()
        shown[markers] = text.replace(" ", "")
    assert list(shown.values()) == ["hellohellohello", "hello<s>hellohello", "hello<s>hello</s>hello"]
    alike = make_detokenizer(tokenizer, [], skip_special=False, markers=frozenset({"<s>"}))
    text = "".join(map(alike.step, ids)) + alike.flush()
    assert text.replace(" ", "") == "hello<s>hello</s>hello"


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
@settings(max_examples=num_examples(1000), deadline=None)
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
@settings(max_examples=num_examples(300), deadline=None)
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
