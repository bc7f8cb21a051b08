"""The text of an output that has no other parts: thoughts are left out, and counted."""

from __future__ import annotations

from ..request import Delta, Sequence
from ..tool_parsers.base import Content
from .output_reader import OutputReader, OutputReading


class BareAnswer:
    """The answer in one output, as it comes. `reading`: how outputs are read; None: all of the text is the answer."""

    def __init__(self, reading: OutputReading | None) -> None:
        self._reader = OutputReader(reading)

    def of(self, delta: Delta) -> str:
        """Return what new output adds to the answer."""
        events = self._reader.events(delta.text, is_last=delta.finish_reason is not None)
        return "".join(event.text for event in events if isinstance(event, Content))

    def num_thoughts(self, sequence: Sequence) -> int:
        """Return how many tokens of the output so far are thoughts."""
        return self._reader.num_thoughts(sequence)
