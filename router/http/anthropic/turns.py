"""The turns of a conversation of Anthropic's API as messages of a chat.

user         one message of role tool per result of a tool, then one of the user with the text, if there is any
assistant    one message: its thoughts, its text, and its calls
system       one message, if it is still to be read and has text
"""

from __future__ import annotations

from collections.abc import Sequence

from ....metadata.errors import RequestError
from ..generation.tool_types import CalledFunction, ToolCall
from ..generation.types import ChatMessage, MessagePart, TextPart
from .types import (
    AssistantTurn,
    MessageText,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserTurn,
)


def chat_messages(turns: Sequence[Turn]) -> list[ChatMessage]:
    """Return the messages of a conversation. Raises RequestError for a result without a call before it, and for calls
    in a last turn of the assistant, whose text is continued."""
    messages, known = list[ChatMessage](), set[str]()
    last_user = max((index for index, turn in enumerate(turns) if isinstance(turn, UserTurn)), default=0)
    for index, turn in enumerate(turns):
        if isinstance(turn, SystemTurn):
            is_over = turn.clear_at == "next_user_message" and index < last_user
            if turn.content and not is_over:
                messages.append(ChatMessage("system", content_of(turn.content)))
            continue
        if isinstance(turn, UserTurn):
            if isinstance(turn.content, str):
                messages.append(ChatMessage("user", turn.content))
            else:
                _check_results(turn.content, known, f"messages[{index}]")
                messages += _of_user(turn.content)
            continue
        messages.append(_of_assistant(turn))
        calls = messages[-1].tool_calls or ()
        if calls and index == len(turns) - 1:
            raise RequestError(
                f"messages[{index}].content: a last message of the assistant is continued, so it cannot hold tool_use",
                param="messages",
            )
        known.update(call.id for call in calls)
    return messages


def content_of(content: str | Sequence[MessagePart]) -> str | list[TextPart]:
    """Return the text of the blocks of a message, as parts if several blocks have text."""
    if isinstance(content, str):
        return content
    texts = [block.text for block in content if isinstance(block, MessageText | TextBlock)]
    return [TextPart("text", text) for text in texts] if len(texts) > 1 else "".join(texts)


def _check_results(content: Sequence[MessagePart], known: set[str], path: str) -> None:
    for place, block in enumerate(content):
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in known:
            raise RequestError(
                f"{path}.content[{place}].tool_use_id: no call before it has the id {block.tool_use_id!r}",
                param="messages",
            )


def _of_user(content: Sequence[MessagePart]) -> list[ChatMessage]:
    results = [block for block in content if isinstance(block, ToolResultBlock)]
    messages = [ChatMessage("tool", _result_of(block), tool_call_id=block.tool_use_id) for block in results]
    if not results or len(results) < len(content):
        messages.append(ChatMessage("user", content_of(content)))
    return messages


def _result_of(block: ToolResultBlock) -> str | list[TextPart]:
    content = content_of(block.content or "")
    if not block.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [TextPart("text", f"Error: {content[0].text}"), *content[1:]]


def _of_assistant(turn: AssistantTurn) -> ChatMessage:
    if isinstance(turn.content, str):
        return ChatMessage("assistant", turn.content)
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    calls = [
        ToolCall(id=block.id, function=CalledFunction(block.name, block.input), type="function")
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    content = content_of(turn.content)
    return ChatMessage(
        "assistant",
        None if calls and content == "" else content,
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )
