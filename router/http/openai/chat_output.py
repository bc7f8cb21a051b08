"""The message of one chat output: the events of its parser as deltas of a stream, or as the whole message.

    Thought                    reasoning_content, or reasoning
    Content                    content
    CallBegin, CallArguments   tool_calls
    CallBroken                 stream: nothing, so the call's arguments stay incomplete
                               whole message: its text is content, and the call is left out

The finish reason is tool_calls if the model stopped by itself and made a whole call.
"""

from __future__ import annotations

from msgspec import UNSET, Struct

from ....metadata.wire.request import FinishReason
from ...reasoning_parsers.base import Thought
from ...tool_parsers.base import CallArguments, CallBegin, CallBroken, CallEnd, Content
from ..generation.output import OutputReader, OutputReading, WholeCall
from ..generation.tool_types import CalledFunction, FunctionDelta, ToolCall, ToolCallDelta
from ..generation.types import AssistantMessage, ChatDelta, ChatFinishReason


class _Draft(Struct):
    """A delta that is being put together: thoughts, content and calls, which are read in this order."""

    thoughts: str = ""
    content: str = ""
    calls: list[ToolCallDelta] = []


class ChatOutput:
    """The message of one output, as it comes."""

    def __init__(self, reading: OutputReading) -> None:
        self._reader = OutputReader(reading)
        self._field = reading.reasoning_field

    def deltas(self, text: str, *, is_last: bool) -> list[ChatDelta]:
        """Return what the next part of the text adds to the message."""
        drafts = list[_Draft]()
        for event in self._reader.events(text, is_last=is_last):
            draft = drafts[-1] if drafts else None
            match event:
                case Thought():
                    if draft is None or draft.content or draft.calls:
                        drafts.append(draft := _Draft())
                    draft.thoughts += event.text
                case Content():
                    if draft is None or draft.calls:
                        drafts.append(draft := _Draft())
                    draft.content += event.text
                case CallBegin() | CallArguments():
                    if draft is None:
                        drafts.append(draft := _Draft())
                    _add_call(draft.calls, event)
                case CallEnd() | CallBroken():
                    pass
        return [self._delta(draft) for draft in drafts]

    def message(self, text: str) -> AssistantMessage:
        """Return the message of a whole output."""
        parts = self._reader.whole(text)
        thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
        content = "".join(part.text for part in parts if isinstance(part, Content))
        calls = [part for part in parts if isinstance(part, WholeCall)]
        return AssistantMessage(
            content=content if content or not (calls or thoughts) else None,
            reasoning_content=thoughts if thoughts and self._field == "reasoning_content" else UNSET,
            reasoning=thoughts if thoughts and self._field == "reasoning" else UNSET,
            tool_calls=[
                ToolCall(id=call.call_id, function=CalledFunction(call.name, call.arguments), type="function")
                for call in calls
            ]
            or UNSET,
        )

    def finish_reason(self, reason: FinishReason) -> ChatFinishReason:
        """Return the finish reason of the message. `reason`: that of the output."""
        return "tool_calls" if reason == "stop" and self._reader.has_call else reason

    def _delta(self, draft: _Draft) -> ChatDelta:
        thoughts = draft.thoughts or None
        return ChatDelta(
            content=draft.content or None,
            reasoning_content=thoughts if self._field == "reasoning_content" else None,
            reasoning=thoughts if self._field == "reasoning" else None,
            tool_calls=draft.calls or None,
        )


def _add_call(calls: list[ToolCallDelta], event: CallBegin | CallArguments) -> None:
    """Add an event to the deltas of calls. Arguments join the delta of the same call."""
    if isinstance(event, CallBegin):
        function = FunctionDelta(name=event.name, arguments="")
        calls.append(ToolCallDelta(index=event.index, id=event.call_id, type="function", function=function))
        return
    if not calls or calls[-1].index != event.index:
        calls.append(ToolCallDelta(index=event.index, function=FunctionDelta(arguments=event.text)))
        return
    last = calls[-1]
    before = "" if last.function.arguments is UNSET else last.function.arguments
    function = FunctionDelta(name=last.function.name, arguments=f"{before}{event.text}")
    calls[-1] = ToolCallDelta(index=last.index, id=last.id, type=last.type, function=function)
