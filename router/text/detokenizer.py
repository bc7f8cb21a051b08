"""Incremental detokenization: token ids in, text out. Characters of several bytes are never split.

The deltas of an output, joined, equal the text of all its ids decoded at once. There are two implementations:

    ByteLevelDetokenizer   vocabularies whose tokens are bytes (GPT-2, Llama 3, Qwen): a table and a UTF-8 decoder.
                           Exact for invalid UTF-8 too. It holds back at most three bytes.
    WindowDetokenizer      all others (sentencepiece and similar): tokenizers' DecodeStream, started with the prompt's
                           last tokens so that a leading space is kept. It holds back at most MAX_HELD tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from tokenizers.decoders import DecodeStream

from .tokenizer import TextTokenizer

MAX_HELD = 24  # tokens held back for a character that never ends
CONTEXT = 6  # tokens before a fragment that decide how it is decoded


class Detokenizer(Protocol):
    """Turns the ids of one sequence into text."""

    def step(self, token_id: int) -> str:
        """Return the text that this token completes, empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Return the text that is held back, at the end of the output. An incomplete character becomes U+FFFD."""
        ...


def make_detokenizer(
    tokenizer: TextTokenizer,
    prompt_ids: Sequence[int],
    *,
    skip_special: bool,
    markers: AbstractSet[str] = frozenset(),
) -> Detokenizer:
    """Return the detokenizer for an output that follows `prompt_ids`.

    If `skip_special`, special tokens are left out, except for those whose text is one of `markers`.
    """
    skipped = skipped_ids(tokenizer, skip_special=skip_special, markers=markers)
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skipped)
    return WindowDetokenizer(tokenizer, prompt_ids, skipped)


def skipped_ids(
    tokenizer: TextTokenizer, *, skip_special: bool, markers: AbstractSet[str] = frozenset()
) -> frozenset[int]:
    """Return the ids of tokens that are left out of a text."""
    skipped = tokenizer.special_ids if skip_special else frozenset[int]()
    return skipped.difference(map(tokenizer.special_by_text.get, markers)) if skipped and markers else skipped


class TokenBytes:
    """Bytes that the tokens of one sequence add to its text. Joined, they are the text's UTF-8."""

    __slots__ = ("_is_first", "_skipped", "_tokenizer")

    def __init__(
        self, tokenizer: TextTokenizer, before: Sequence[int] = (), skipped: frozenset[int] = frozenset()
    ) -> None:
        """`before`: ids that the sequence follows. `skipped`: ids of tokens that are left out of the text."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._is_first = skipped.issuperset(before[-CONTEXT:])  # no text has begun

    def of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add now."""
        if token_id in self._skipped:
            return b""
        return self._tokenizer.first_bytes(token_id) if self._is_first else self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> bytes:
        """Return the same, for a token that is left out its own bytes."""
        return self._tokenizer.token_bytes(token_id) if token_id in self._skipped else self.of(token_id)

    def take(self, token_id: int) -> bytes:
        """Return the bytes that a token adds, and go on behind it."""
        data = self.of(token_id)
        self._is_first = self._is_first and token_id in self._skipped
        return data


class ByteLevelDetokenizer:
    """Detokenizer for vocabularies whose tokens are bytes."""

    __slots__ = ("_decoder", "_is_split", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, skipped: AbstractSet[int]) -> None:
        """`skipped`: ids of tokens that are left out of the text."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_split = False  # the last token ended within a character

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = None if self._is_split else self._tokenizer.byte_level_text(token_id)
        if text is None:
            text = self._decoder.decode(self._tokenizer.byte_level_bytes(token_id))
            self._is_split = self._decoder.getstate()[0] != b""
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for any vocabulary, by DecodeStream."""

    __slots__ = ("_context", "_held", "_skipped", "_stream", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], skipped: AbstractSet[int]) -> None:
        """`skipped`: ids of tokens that are left out of the text."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context = [token_id for token_id in prompt_ids[-CONTEXT:] if token_id not in skipped]
        self._held: list[int] = []
        self._stream = DecodeStream(self._context, skip_special_tokens=False)

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        try:
            delta = self._stream.step(self._tokenizer.inner, token_id)
        except Exception:  # it has no class of its own: bytes that are no text changed what was decoded before
            return self._restart()
        if delta is not None:
            self._settle()
            return delta
        return "" if len(self._held) < MAX_HELD else self._restart()

    def _restart(self) -> str:
        """Return the text that is held back, and begin anew behind it."""
        delta = self.flush()
        self._stream = DecodeStream(self._context, skip_special_tokens=False)
        return delta

    def flush(self) -> str:
        if not self._held:
            return ""
        before = self._decode(self._context)
        delta = self._decode(self._context + self._held)[len(before) :]
        self._settle()
        return delta

    def _settle(self) -> None:
        self._context = (self._context + self._held)[-CONTEXT:]
        self._held.clear()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)
