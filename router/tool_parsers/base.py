"""Tool-call parsers: the text of a model, part by part, becomes content and tool calls.

A parser belongs to one output. `feed` takes the next part of its text, `finish` its end. Both return events:

    Content         text for the reader
    CallBegin       a call of a tool: its index in the output, a new id, and the tool's name
    CallArguments   the next part of the call's arguments, which are a JSON object as text
    CallEnd         the call is whole: its arguments, joined, are a valid JSON object
    CallBroken      the call never becomes whole; carries all text that the model wrote of it

Rules of every parser:

- The events, with neighbouring texts joined, do not depend on how the text is divided into parts.
- Exactly one CallEnd or CallBroken follows each CallBegin, before the next CallBegin.
- A call is broken if its text ends early (at max_tokens) or is not what the format demands. The arguments that a
  parser has given of it are the beginning of a JSON object, and never a whole one.
- Text that only looks like a call before the tool's name is known is content.
- White space before a call, between calls, and at the end after a call is dropped, and so is a closing mark that is cut
  off. All other text is content.
- Raw control characters in JSON strings are escaped: models write them, and JSON forbids them.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

Schema = Mapping[str, Any]  # JSON schema of a tool's arguments
MAX_NAME = 256  # characters of a tool's name


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. `index` counts the calls of the output from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is whole."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call never becomes whole. `text` is all that the model wrote of it."""

    index: int
    text: str


Event = Content | CallBegin | CallArguments | CallEnd | CallBroken


def new_call_id() -> str:
    """Return a random id of a call, as long as OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


class ToolParser(ABC):
    """Parser of one output. A subclass reads `_text` in `_advance`, and reports by `_content` and the `_call` methods.

    `markers`: texts of the format that may be special tokens, which the parser must see.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Mapping[str, Schema], new_id: Callable[[], str] | None = None) -> None:
        """`tools`: the JSON schema of the arguments of each tool, by its name. `new_id` returns the ids of calls."""
        self._tools = tools
        self._new_id = new_id or self.make_id
        self._text: str = ""  # not yet understood
        self._is_last = False  # no more text follows
        self._raw = ""  # what has been read of the present call
        self._num_calls = 0
        self._is_open = False  # a call has begun and has not ended
        self._space: str = ""  # white space that is dropped if a call follows
        self._is_after_call = False  # no content since the last call
        self._has_content = False
        self._events: list[Event] = []

    @staticmethod
    def make_id() -> str:
        """Return a new id for a call, in the form that the family's template accepts."""
        return new_call_id()

    @classmethod
    def grammar(cls, tools: Mapping[str, Schema], *, may_repeat: bool, literal: Callable[[str], str]) -> str | None:
        """Return Lark rules of llguidance whose rule `calls` is one call of one of the tools, or more if `may_repeat`.

        None: this format has no grammar. `literal` returns the Lark form of a fixed text or special token.
        """
        del tools, may_repeat, literal
        return None

    def feed(self, text: str) -> list[Event]:
        """Take the next part of the text and return what it brings."""
        assert not self._is_last, "text after the end"
        self._text += text
        self._read()
        return self._take()

    def finish(self) -> list[Event]:
        """The output has ended. Return the rest."""
        self._is_last = True
        self._read()
        raw = self._raw + self._text
        self._raw = self._text = ""
        if self._is_open:
            self._call_broken(raw)
        else:
            self._content(raw)
        if self._space and not self._is_after_call:
            self._events.append(Content(self._space))
        self._space = ""
        return self._take()

    @abstractmethod
    def _advance(self) -> bool:
        """Read the beginning of `_text`, which is not empty. Return False if more text is needed to go on."""

    def _read(self) -> None:
        while self._text and self._advance():
            pass

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _content(self, text: str) -> None:
        """Report content, except the white space at its end."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if self._is_after_call and not self._has_content:
            kept = kept.lstrip()
        if kept:
            self._events.append(Content(kept))
            self._has_content, self._is_after_call = True, False

    def _content_until(self, *markers: str) -> str | None:
        """Report content up to the first of these markers, and drop the marker. Return it, None if there is none."""
        at, marker = min(((self._text.find(each), each) for each in markers if each in self._text), default=(-1, ""))
        if at >= 0:
            self._content(self._text[:at])
            self._text = self._text[at + len(marker) :]
            return marker
        end = len(self._text) - (0 if self._is_last else possible_start(self._text, markers))
        self._content(self._text[:end])
        self._text = self._text[end:]
        return None

    def _skip_space(self) -> None:
        """Move white space at the beginning of `_text` to the present call."""
        rest = self._text.lstrip()
        self._raw += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _consume(self, length: int) -> None:
        """Move text to the present call."""
        self._raw += self._text[:length]
        self._text = self._text[length:]

    def _pass_end(self, mark: str) -> bool:
        """Drop the mark behind a call that has ended, if it is there. Return False if more text is needed to say so."""
        rest = self._text.lstrip()
        if rest.startswith(mark):
            self._text = rest[len(mark) :]
        elif mark.startswith(rest):
            self._text = "" if self._is_last else self._text
            return False
        return True

    def _end_broken(self, *ends: str, begin: str = "") -> str | None:
        """Read a broken call up to the first of these marks, and report it. The mark `begin`, if there is one, stays,
        since the next call begins there. Return the mark that was found, None if more text is needed."""
        marks = (*ends, begin) if begin else ends
        at, mark = min(((self._text.find(each), each) for each in marks if each in self._text), default=(-1, ""))
        if at < 0:
            self._consume(len(self._text) - possible_start(self._text, marks))
            return None
        self._consume(at + (0 if mark == begin else len(mark)))
        self._call_broken(self._raw)
        return mark

    def _call_begins(self, name: str) -> None:
        assert not self._is_open, f"call {self._num_calls} has not ended"
        self._events.append(CallBegin(self._num_calls, self._new_id(), name))
        self._is_open = True
        self._space = ""

    def _call_arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._num_calls, text))

    def _call_ends(self) -> None:
        self._events.append(CallEnd(self._num_calls))
        self._over()

    def _call_broken(self, raw: str) -> None:
        self._events.append(CallBroken(self._num_calls, raw))
        self._over()

    def _over(self) -> None:
        self._num_calls += 1
        self._is_open, self._is_after_call, self._raw = False, True, ""


def possible_start(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest end of a text that begins a marker without completing it."""
    longest = 0
    for marker in markers:
        for length in range(min(len(text), len(marker) - 1), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest
