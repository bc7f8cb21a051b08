"""The text of an output that has no other parts: thoughts are left out, and counted."""

from __future__ import annotations

from ..request import Delta, Sequence
from .chat_output import ChatOutput, OutputReading


class AnswerText:
    """The answer in one output, as it comes. `reading`: how outputs are read; None: all of the text is the answer."""

    def __init__(self, reading: OutputReading | None) -> None:
        self._reading = reading
        self._output = None if reading is None else ChatOutput(reading)

    def of(self, delta: Delta) -> str:
        """Return what new output adds to the answer."""
        if self._output is None:
            return delta.text
        deltas = self._output.deltas(delta.text, is_last=delta.finish_reason is not None)
        return "".join(each.content or "" for each in deltas)

    def num_thoughts(self, sequence: Sequence) -> int:
        """Return how many tokens of the output so far are thoughts."""
        if self._reading is None or self._reading.new_counter is None:
            return 0
        return self._reading.new_counter(sequence).count(sequence.received)
