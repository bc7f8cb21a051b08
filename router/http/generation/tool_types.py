"""Types of OpenAI's tools: those that a request offers, its choice, and the calls of messages and of streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

MAX_TOOLS = 512
MAX_CALLS = 512  # of one message

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/\-]{1,128}$")]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]
DirectCallers = Annotated[list[str], Meta(extra_json_schema={"contains": {"const": "direct"}})]  # check_callers checks


class ClientTool(Struct, frozen=True):
    """Base of the tools that a request offers. The client runs all of them."""


class FunctionTool(ClientTool, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments. The schema binds the model
    if a call is required. What of it cannot be enforced is refused if `strict` is true, and left out otherwise."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ClientTool, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tool. Only functions are served. Clients may also write the fields of `function` beside `type`, or leave `type`
    out."""

    type: Literal["function"] = "function"
    function: FunctionTool


class FunctionChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """The name of the function that must be called."""

    name: str


class ToolChoiceObject(Struct, frozen=True, forbid_unknown_fields=True):
    """A choice as an object. `function`, or `tool`, names the one that must be called once; its name may also stand
    beside `type`. The other types are the same choices as the texts."""

    type: Literal["function", "tool", "none", "auto", "required", "any"]
    function: FunctionChoice | None = None


ToolChoice = Literal["none", "auto", "required", "any"] | ToolChoiceObject  # any: Anthropic's and Mistral's required
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that a message calls. `arguments` is a JSON object as text; histories may also hold the object
    itself."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool call of an assistant's message."""

    id: CallId
    function: CalledFunction
    type: Literal["function"] | None = None


class MadeFunction(Struct, frozen=True):
    """The function of a call that the model made. `arguments` is a JSON object as text."""

    name: str
    arguments: str


class MadeCall(Struct, frozen=True, kw_only=True):
    """A tool call that the model made."""

    id: str
    function: MadeFunction
    type: Literal["function"] = "function"


class FunctionDelta(Struct, frozen=True, omit_defaults=True):
    """A part of a streamed call: its name, or more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True, omit_defaults=True):
    """A part of the streamed call with this index. The first part has the id and the name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
