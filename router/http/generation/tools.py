"""Tools of a request: which ones the model may call, how its calls are read, and the grammar that forces a call.

    tool_choice    tools in the prompt    calls are read    the output is bound by a grammar
    none           no                     no                no
    auto           yes                    yes               to calls or a format, if one is asked for
    required       yes                    yes               to one call or more
    a tool         yes                    yes               to one call of that tool

`auto` is the default if there are tools. If `parallel_tool_calls` is false, a grammar allows one call, and with `auto`
further calls are left out of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from ....metadata.errors import RequestError
from ...text.chat_template import ChatTemplate
from ...tool_parsers.base import ToolParser
from ...tool_parsers.registry import TOOL_PARSERS, parser_for_template
from .tool_types import CalledFunction, FunctionTool, Tool, ToolCall, ToolChoice, ToolChoiceObject
from .types import ChatMessage, ChatRequest, TextPart

NO_PARSER = "none"  # value of --tool-parser that turns it off


class ToolUse(NamedTuple):
    """Tools that the model may call. `forced` are those of which it must call one; empty: it may also write text."""

    tools: Sequence[Tool]
    parser: type[ToolParser]
    parser_name: str
    forced: Sequence[Tool]
    is_parallel: bool

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of the arguments of each tool, by its name."""
        return {tool.function.name: _schema_of(tool.function) for tool in self.tools}

    @property
    def bound_schemas(self) -> dict[str, dict[str, Any]]:
        """The same of the tools that a grammar of calls allows: the forced ones, or all if none is forced."""
        return {tool.function.name: _schema_of(tool.function) for tool in self.forced or self.tools}

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [{"type": "function", "function": _plain(tool.function)} for tool in self.tools]


class _Choice(NamedTuple):
    """A choice of tools. If it is neither none nor required, and names no tool, the model may call."""

    is_none: bool = False
    is_required: bool = False
    name: str | None = None  # of the tool that must be called


def _choice_of(choice: ToolChoice | None) -> _Choice:
    """Return a choice that a client wrote as a text or as an object."""
    if not isinstance(choice, ToolChoiceObject):
        return _Choice(is_none=choice == "none", is_required=choice in ("required", "any"))
    names_one = choice.type in ("function", "tool")
    if names_one != (choice.function is not None):
        words = f"type {choice.type!r} {'needs the name of a tool' if names_one else 'excludes a name'}"
        raise RequestError(f"tool_choice: {words}", param="tool_choice")
    if choice.function is None:
        return _choice_of(cast("ToolChoice", choice.type))
    return _Choice(name=choice.function.name)


def tool_use(body: ChatRequest, template: ChatTemplate | None, flag: str | None) -> ToolUse | None:
    """Return the tools that the model may call; None if there are none. `flag`: the value of --tool-parser, if given.

    Raises RequestError for tools that exclude each other or other fields, a choice that is none of them, and a model
    whose calls cannot be read.
    """
    tools, choice = body.tools or [], _choice_of(body.tool_choice)
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"tools[{index}].function.name: {name!r} is there twice", param="tools")
    if choice.name is not None and choice.name not in names:
        known = ", ".join(names) or "none"
        raise RequestError(
            f"tool_choice: there is no tool {choice.name!r}; the tools are: {known}", param="tool_choice"
        )
    if choice.is_required and not tools:
        raise RequestError("tool_choice: a required call needs tools", param="tool_choice")
    if not tools or choice.is_none:
        return None
    if template is None or not template.knows_tools:
        raise RequestError(
            f"tools: the model's chat template has no place for tools, so {body.model!r} cannot use them; leave tools "
            "out, or serve a model whose template writes them",
            param="tools",
        )
    parser_name = flag or parser_for_template(template.source)
    if parser_name is None or parser_name == NO_PARSER:
        why = "its chat template does not tell how it writes calls" if flag is None else "the router reads no calls"
        raise RequestError(
            f"tools: calls of this model cannot be read: {why}; start the router with --tool-parser and one of "
            f"{', '.join(TOOL_PARSERS)}, or set tool_choice to none",
            param="tools",
        )
    forced: Sequence[Tool] = []
    if choice.is_required:
        forced = tools
    elif choice.name is not None:
        forced = [tool for tool in tools if tool.function.name == choice.name]
    if forced and body.ignore_eos:
        raise RequestError(
            "ignore_eos: excludes a tool_choice that forces calls, whose end is the end of the text", param="ignore_eos"
        )
    is_parallel = body.parallel_tool_calls is not False and choice.name is None
    return ToolUse(tools, TOOL_PARSERS[parser_name], parser_name, forced, is_parallel)


def check_callers(path: str, allowed_callers: Sequence[str] | None) -> None:
    """Raise RequestError for the tool at a path of the body that the model may not call itself."""
    if allowed_callers is not None and "direct" not in allowed_callers:
        raise RequestError(f"{path}.allowed_callers: only the model calls tools; add 'direct'", param="tools")


def in_current_form(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages in which calls and results of functions, which OpenAI's API has deprecated, are those of tools,
    and refusals are texts. Raises RequestError for a result without a call before it."""
    current, last_id = list[ChatMessage](), None
    for index, message in enumerate(messages):
        if message.function_call is not None:
            last_id = f"call_{index}"
            calls = [*(message.tool_calls or ()), ToolCall(last_id, message.function_call)]
            message = replace(message, function_call=None, tool_calls=calls)
        if message.role == "function":
            if last_id is None:
                raise _history_error(f"messages[{index}].role: no message before this one of a function has a call")
            message = replace(message, role="tool", tool_call_id=last_id)
        if message.refusal:
            message = replace(message, refusal=None, content=_with_text(message.content, message.refusal))
        current.append(message)
    return current


def _with_text(content: str | list[TextPart] | None, text: str) -> str | list[TextPart]:
    """Return a content with a text behind it."""
    if not content:
        return text
    return [*([TextPart("text", content)] if isinstance(content, str) else content), TextPart("text", text)]


def check_history(messages: Sequence[ChatMessage]) -> None:
    """Raise RequestError for a misplaced or malformed tool call, and for a tool message that answers no earlier one."""
    known = set[str]()
    for index, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            raise _history_error(f"messages[{index}].tool_calls: only a message of the assistant has tool calls")
        for place, call in enumerate(message.tool_calls or ()):
            arguments_of(call.function, f"messages[{index}].tool_calls[{place}].function.arguments")
            known.add(call.id)
        if message.role != "tool":
            if message.tool_call_id is not None:
                raise _history_error(f"messages[{index}].tool_call_id: only a message of a tool has it")
        elif message.tool_call_id is None:
            raise _history_error(f"messages[{index}].tool_call_id: a message of a tool needs it")
        elif message.tool_call_id not in known:
            raise _history_error(
                f"messages[{index}].tool_call_id: no call before it has the id {message.tool_call_id!r}"
            )


def plain_calls(message: ChatMessage, *, as_text: bool) -> list[dict[str, Any]]:
    """Return the tool calls of a message as chat templates expect them. Arguments are objects, or JSON text."""
    read = _argument_text if as_text else arguments_of
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": read(call.function, "messages")},
        }
        for call in message.tool_calls or ()
    ]


def arguments_of(function: CalledFunction, path: str) -> dict[str, Any]:
    """Return the arguments of a call. Raises RequestError that names `path` if they are no JSON object."""
    arguments = function.arguments
    if isinstance(arguments, dict):
        return arguments
    if not arguments.strip():
        return {}
    try:
        return _decode_object(arguments)
    except (msgspec.DecodeError, RecursionError):
        raise RequestError(f"{path}: it must be a JSON object as text", param=path.partition("[")[0]) from None


def _argument_text(function: CalledFunction, _path: str) -> str:
    """Return the arguments of a call as JSON text: the client's own, if it gave text."""
    arguments = function.arguments
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments if arguments.strip() else "{}"


def _history_error(words: str) -> RequestError:
    return RequestError(words, param="messages")


def _plain(function: FunctionTool) -> dict[str, Any]:
    """Return the fields that a client gave of a function."""
    given = {name: getattr(function, name) for name in FunctionTool.__struct_fields__}
    return {name: value for name, value in given.items() if value is not None}


def _schema_of(function: FunctionTool) -> dict[str, Any]:
    """Return the schema of a function's arguments. They are always an object; without a schema, an empty one."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}


_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
