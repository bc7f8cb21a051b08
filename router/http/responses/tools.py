"""The tools of a response: as functions that the model sees, and back from a call to the tool that the client named.

function     a function of the same name
custom       a function with one argument, `input`, which is any text
namespace    each of its tools, as NAMESPACE__NAME
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ..generation.tool_types import FunctionChoice, FunctionTool, Tool, ToolChoice, ToolChoiceObject
from ..generation.tools import check_callers
from .types import (
    ResponseCustomTool,
    ResponseFunction,
    ResponseNamedTool,
    ResponseTool,
    ResponseToolChoice,
    ToolNamespace,
)

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}  # schema of a custom tool's arguments


class CalledTool(NamedTuple):
    """A tool by the names that the client gave it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class _CustomArguments(msgspec.Struct):
    input: str


class ResponseTools:
    """The tools of one response. Raises RequestError for one that the model may not call.

    `for_chat` are the functions that the model sees. `paths` are their places in the body, by those in `for_chat`.
    """

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        self.for_chat: list[Tool] = []
        self.paths: dict[str, str] = {}
        self._called: dict[str, CalledTool] = {}  # by the name that the model sees
        for path, namespace, tool in _flat(tools):
            check_callers(path, tool.allowed_callers)
            called = CalledTool(tool.name, namespace, isinstance(tool, ResponseCustomTool))
            name = name_for_chat(tool.name, namespace)
            self.paths[f"tools[{len(self.for_chat)}].function"] = path
            self.for_chat.append(Tool(function=_function(name, tool)))
            self._called[name] = called

    def called(self, name: str) -> CalledTool:
        """Return the tool that the model calls by a name. A name that it made up is that of a function."""
        return self._called.get(name) or CalledTool(name)


def choice_for_chat(choice: ResponseToolChoice | None) -> ToolChoice | None:
    """Return a choice of tools as that of a chat completion."""
    return (
        ToolChoiceObject("function", FunctionChoice(choice.name)) if isinstance(choice, ResponseNamedTool) else choice
    )


def name_for_chat(name: str, namespace: str | None) -> str:
    """Return the name by which the model sees a tool."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def custom_arguments(text: str) -> dict[str, Any]:
    """Return the arguments by which the model calls a custom tool with this input."""
    return {"input": text}


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool that the model called with these arguments. Arguments of any other kind are
    the input as they are."""
    try:
        return msgspec.json.decode(arguments, type=_CustomArguments).input
    except msgspec.DecodeError:
        return arguments


def _flat(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, str | None, ResponseFunction | ResponseCustomTool]]:
    """Yield the place in the body, the namespace and the tool of each function and custom tool."""
    for index, tool in enumerate(tools):
        if isinstance(tool, ToolNamespace):
            for place, inner in enumerate(tool.tools):
                yield f"tools[{index}].tools[{place}]", tool.name, inner
        else:
            yield f"tools[{index}]", None, tool


def _function(name: str, tool: ResponseFunction | ResponseCustomTool) -> FunctionTool:
    if isinstance(tool, ResponseFunction):
        return FunctionTool(name, tool.description, tool.parameters, tool.strict)
    words = [] if tool.description is None else [tool.description]
    if tool.format is not None and tool.format.definition is not None:
        words.append(f"The input follows this grammar ({tool.format.syntax}):\n{tool.format.definition}")
    return FunctionTool(name, "\n\n".join(words) or None, _INPUT)
