"""The blocks of one message: the events of its parser as events of a stream, or as the whole content.

    Thought                    a block of type thinking, if thoughts are shown
    Content                    text
    CallBegin, CallArguments   tool_use
    CallBroken                 stream: the block ends with incomplete input
                               whole content: its text is text, and the call is left out

A block ends when one of another type begins, and with its call.
"""

from __future__ import annotations

from msgspec import Raw, structs

from ..reasoning_parsers.base import Thought
from ..tool_parsers.base import CallArguments, CallBegin, CallBroken, CallEnd, Content
from .messages_types import (
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
from .output_reader import OutputReader


class MessageBlocks:
    """The blocks of one message, as they come. `reader`: that of its output."""

    def __init__(self, reader: OutputReader, *, shows_thoughts: bool) -> None:
        self._reader = reader
        self._shows_thoughts = shows_thoughts
        self._num_begun = 0
        self._open: OutputBlock | None = None  # the last block, as it began, until it ends
        self._events: list[BlockEvent] = []

    def events(self, text: str, *, is_last: bool) -> list[BlockEvent]:
        """Return what the next part of the text adds to the message."""
        for event in self._reader.events(text, is_last=is_last):
            match event:
                case Thought() if self._shows_thoughts:
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
                case _:
                    pass
        if is_last:
            self._end()
        events, self._events = self._events, []
        return events

    def whole(self, text: str) -> list[OutputBlock]:
        """Return the blocks of a whole output."""
        blocks = list[OutputBlock]()
        call, arguments = CallBegin(0, "", ""), ""
        for event in self._reader.events(text, is_last=True):
            last = blocks[-1] if blocks else None
            match event:
                case Thought() if self._shows_thoughts:
                    if isinstance(last, OutputThinking):
                        blocks[-1] = structs.replace(last, thinking=last.thinking + event.text)
                    else:
                        blocks.append(OutputThinking(event.text))
                case Content() | CallBroken():
                    if isinstance(last, OutputText):
                        blocks[-1] = structs.replace(last, text=last.text + event.text)
                    else:
                        blocks.append(OutputText(event.text))
                case CallBegin():
                    call, arguments = event, ""
                case CallArguments():
                    arguments += event.text
                case CallEnd():
                    blocks.append(OutputToolUse(call.call_id, call.name, Raw(arguments.encode())))
                case _:
                    pass
        return blocks

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
