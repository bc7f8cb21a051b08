"""Stop strings. The router alone stops on them, because it alone has text.

The rule is that of reading character by character: the output stops at the first character that completes a stop
string; where that completes several, the longest counts. So the result does not depend on how the text was cut into
tokens. Text that may be the beginning of a stop string is held back until the next characters settle it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one choice's text."""

    __slots__ = ("_held", "_include", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """`include` leaves the stop string itself in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """The text that may be shown now. With `may_stop` False (before min_tokens) no stop string can end in `text`.

        After `found` is set the choice is over; nothing more may be fed.
        """
        assert self.found is None, f"text after the stop string {self.found!r}"
        if not self._stops or not text:
            return text
        buffer = self._held + text
        if may_stop:
            match = self._first_match(buffer, len(self._held))
            if match is not None:
                start, end = match
                self.found = buffer[start:end]
                self._held = ""
                return buffer[: end if self._include else start]
        held_len = self._possible_start(buffer)
        self._held = buffer[len(buffer) - held_len :]
        return buffer[: len(buffer) - held_len]

    def flush(self) -> str:
        """What is held back; the output ends here without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, int] | None:
        """(start, end) of the match that ends first beyond the old text; of those the longest."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end)
        return best

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that a stop string begins with, short of a whole one."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(buffer), len(stop) - 1), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
