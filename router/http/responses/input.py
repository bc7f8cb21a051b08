"""The input of /v1/responses as the messages of a chat completion.

    message                                          of the assistant: text of its message; of others: a message
    reasoning                                        thoughts of the assistant's message
    function_call, custom_tool_call                  a tool call of the assistant's message
    function_call_output, custom_tool_call_output    a message of a tool

Items of the assistant that follow each other are one message. Only thoughts or text after a text begin another one, if
no call stands between them.
"""

from __future__ import annotations

from msgspec import Raw, Struct

from ....metadata.errors import RequestError
from ..bodies.bodies import decode
from ..generation.tool_types import CalledFunction, ToolCall
from ..generation.tools import arguments_of
from ..generation.types import ChatMessage, TextPart
from .tools import custom_arguments, name_for_chat
from .types import (
    INPUT_ITEMS,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    InputItem,
    InputPart,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)

_LONGEST_TYPE = 64  # of an item, in an error


class _Typed(Struct):
    type: str | None = None


def messages_of(body: ResponsesRequest) -> list[ChatMessage]:
    """Return the messages of a body, with the instructions as the first one.

    Raises RequestError for an item that is not served or malformed, and for an output whose call is not before it.
    """
    conversation = _Conversation()
    if body.instructions:
        conversation.messages.append(ChatMessage("system", body.instructions))
    if isinstance(body.input, str):
        conversation.messages.append(ChatMessage("user", body.input))
    else:
        for index, item in enumerate(body.input):
            path = f"input[{index}]"
            conversation.add(_item_of(item, path), path)
    conversation.end_turn()
    return conversation.messages


class _Turn(Struct):
    """A message of the assistant that is being put together."""

    thoughts: list[str] = []
    parts: list[TextPart] = []
    calls: list[ToolCall] = []


class _Conversation:
    """The messages so far, and the assistant's message that the next items may add to."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._turn = _Turn()
        self._call_ids: set[str] = set()

    def add(self, item: InputItem, path: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._turn_after_text().parts += _parts_of(item.content)
            case MessageItem():
                self.end_turn()
                self.messages.append(ChatMessage(item.role, _content_of(_parts_of(item.content))))
            case ReasoningItem():
                parts = item.content or item.summary or []
                self._turn_after_text().thoughts += [part.text for part in parts]
            case CallItem():
                function = CalledFunction(name_for_chat(item.name, item.namespace), item.arguments)
                arguments_of(function, f"{path}.arguments")
                self._call(item.call_id, function)
            case CustomCallItem():
                name = name_for_chat(item.name, item.namespace)
                self._call(item.call_id, CalledFunction(name, custom_arguments(item.input)))
            case CallOutputItem():
                if item.call_id not in self._call_ids:
                    raise RequestError(
                        f"{path}.call_id: no call before it has the id {item.call_id!r}; send the item of the call too",
                        param="input",
                    )
                self.end_turn()
                content = _content_of(_parts_of(item.output))
                self.messages.append(ChatMessage("tool", content, tool_call_id=item.call_id))

    def end_turn(self) -> None:
        """Add the message of the assistant, if there is one."""
        turn, self._turn = self._turn, _Turn()
        if turn.thoughts or turn.parts or turn.calls:
            self.messages.append(
                ChatMessage(
                    "assistant",
                    _content_of(turn.parts) if turn.parts else None,
                    tool_calls=turn.calls or None,
                    reasoning_content="\n".join(turn.thoughts) or None,
                )
            )

    def _call(self, call_id: str, function: CalledFunction) -> None:
        self._call_ids.add(call_id)
        self._turn.calls.append(ToolCall(call_id, function))

    def _turn_after_text(self) -> _Turn:
        """Return the assistant's message for thoughts or text: a new one if the present one ends with text."""
        if self._turn.parts and not self._turn.calls:
            self.end_turn()
        return self._turn


def _item_of(raw: Raw, path: str) -> InputItem:
    """Return an item of the input, decoded by its type. An item without a type is a message."""
    data = bytes(raw)
    try:
        kind = decode(data, _Typed).type or "message"
        if kind in INPUT_ITEMS:
            return decode(data, INPUT_ITEMS[kind])
    except RequestError as error:
        raise RequestError(f"{path}{'.' if error.param else ': '}{error}", param="input") from None
    words = f"{path}.type: {kind[:_LONGEST_TYPE]!r} is not served; served are: {', '.join(INPUT_ITEMS)}"
    if kind == "item_reference":
        words += "; responses are not stored: send the items themselves, as clients do with store: false"
    raise RequestError(words, param="input")


def _parts_of(content: str | list[InputPart]) -> list[TextPart]:
    texts = [content] if isinstance(content, str) else [part.text for part in content] or [""]
    return [TextPart("text", text) for text in texts]


def _content_of(parts: list[TextPart]) -> str | list[TextPart]:
    """Return the content of a message: a text, or parts if there are several."""
    return parts if len(parts) > 1 else "".join(part.text for part in parts)
