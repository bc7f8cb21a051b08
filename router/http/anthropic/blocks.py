"""The blocks of one message: the events of its parser as events of a stream, or as the whole content.

    Thought                    a block of type thinking
    Content                    text
    CallBegin, CallArguments   tool_use
    CallBroken                 stream: the block ends with incomplete input
                               whole content: its text is text, and the call is left out

A block ends when one of another type begins, and with its call.
"""

from __future__ import annotations

from msgspec import Raw

from ...reasoning_parsers.base import Thought
from ...tool_parsers.base import CallArguments, CallBegin, CallBroken, CallEnd, Content
from ..generation.output import OutputReader, WholeCall, WholePart
from .types import (
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    InputDelta,
    OutputBlock,
    OutputText,
    OutputThinking,
    OutputToolUse,
    SignatureDelta,
    TextDelta,
    ThinkingDelta,
)


class MessageBlocks:
    """The blocks of one message, as they come. `reader`: that of its output."""

    def __init__(self, reader: OutputReader) -> None:
        self._reader = reader
        self._num_begun = 0
        self._open: OutputBlock | None = None  # the last block, as it began, until it ends
        self._events: list[BlockEvent] = []

    def events(self, text: str, *, is_last: bool) -> list[BlockEvent]:
        """Return what the next part of the text adds to the message."""
        for event in self._reader.events(text, is_last=is_last):
            match event:
                case Thought():
                    if not isinstance(self._open, OutputThinking):
                        self._begin(OutputThinking(""))
                    self._add(ThinkingDelta(event.text))
                case Content():
                    if not isinstance(self._open, OutputText):
                        self._begin(OutputText(""))
                    self._add(TextDelta(event.text))
                case CallBegin():
                    self._begin(OutputToolUse(event.call_id, event.name, Raw(b"{}")))
                case CallArguments():
                    self._add(InputDelta(event.text))
                case CallEnd() | CallBroken():
                    self._end()
        if is_last:
            self._end()
        events, self._events = self._events, []
        return events

    def whole(self, text: str) -> list[OutputBlock]:
        """Return the blocks of a whole output."""
        return [_block(part) for part in self._reader.whole(text)]

    def _begin(self, block: OutputBlock) -> None:
        self._end()
        self._events.append(BlockStart(self._num_begun, block))
        self._open = block
        self._num_begun += 1

    def _add(self, delta: TextDelta | ThinkingDelta | InputDelta) -> None:
        self._events.append(BlockDelta(self._num_begun - 1, delta))

    def _end(self) -> None:
        if isinstance(self._open, OutputThinking):
            self._events.append(BlockDelta(self._num_begun - 1, SignatureDelta()))
        if self._open is not None:
            self._events.append(BlockStop(self._num_begun - 1))
        self._open = None


def _block(part: WholePart) -> OutputBlock:
    match part:
        case Thought():
            return OutputThinking(part.text)
        case Content():
            return OutputText(part.text)
        case WholeCall():
            return OutputToolUse(part.call_id, part.name, Raw(part.arguments.encode()))
