"""Stop strings: where the text of an output ends.

Only the router looks for stop strings, because nodes have no text. The result equals reading character by character:
the output stops at the first character that completes a stop string. If it completes several, the longest counts. So
the result does not depend on how tokens divide the text. Text that may be the beginning of a stop string is held back
until the next characters decide.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop strings in the text of one sequence."""

    __slots__ = ("_held", "_include", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """If `include`, the stop string itself stays in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Return the text that may be shown now. If not `may_stop` (before min_tokens), no stop string ends in `text`.

        When `found` is set, the sequence has ended and no more text may be fed.
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
        """Return the text that is held back. The output ends here without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, int] | None:
        """Return (start, end) of the match that ends first after the old text; the longest of several."""
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
        """Return the length of the longest end of `buffer` that begins a stop string without completing it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(buffer), len(stop) - 1), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
