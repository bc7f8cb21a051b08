"""Texts that are known in part: a rank has the tokens of a row, and some around them that it may read. Without torch.

    text      ......................................................
    row                          ***********
    known                  ------***********------

Rank 0 sends no more of a long prompt with each of its chunks (work_frames.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

from ..work import BatchRow

MARGIN = (
    65  # a drafter reads as many tokens ahead as an MTP head may have layers, 64, and the sampled token is one more
)


class Around(NamedTuple):
    """Tokens around a row that a rank may read."""

    before: Sequence[int]
    after: Sequence[int]
    text_len: int

    @classmethod
    def of(cls, row: BatchRow, text: Sequence[int]) -> Around:
        """Return the tokens of a text around a row, which continues it at the row's position."""
        start, stop = row.position, row.position + len(row.input_ids)
        assert list(text[start:stop]) == list(row.input_ids), (start, stop, len(text))
        return cls(text[max(0, start - MARGIN) : start], text[stop : stop + MARGIN], len(text))

    def text(self, row: BatchRow) -> Sequence[int]:
        """Return the text around the row. Raises ValueError if there is no such text."""
        known, first = [*self.before, *row.input_ids, *self.after], row.position - len(self.before)
        if not 0 <= first <= first + len(known) <= self.text_len:
            raise ValueError(f"tokens {first} to {first + len(known)} of a text of {self.text_len}")
        return known if len(known) == self.text_len else KnownTokens(known, first, self.text_len)


class KnownTokens(Sequence[int]):
    """The tokens of a text, of which those from position `first` on are known. Reading others is a bug."""

    __slots__ = ("_first", "_known", "_text_len")

    def __init__(self, known: Sequence[int], first: int, text_len: int) -> None:
        self._known, self._first, self._text_len = known, first, text_len

    def __len__(self) -> int:
        return self._text_len

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice, /) -> Any:
        """Return a token, or consecutive ones. The begin of the text, `[:stop]`, is a text again, as far as known."""
        if not isinstance(index, slice):
            return self._read(*slice(index, index + 1 or None).indices(self._text_len))[0]
        start, stop, step = index.indices(self._text_len)
        if start == 0 < self._first < stop:
            return KnownTokens(self._known[: stop - self._first], self._first, stop)
        return self._read(start, stop, step)

    def _read(self, start: int, stop: int, step: int) -> Sequence[int]:
        end = self._first + len(self._known)
        assert step == 1 and (start >= stop or self._first <= start <= stop <= end), (
            start,
            stop,
            step,
            self._first,
            end,
        )
        return self._known[max(0, start - self._first) : max(0, stop - self._first)]
