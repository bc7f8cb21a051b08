"""Bodies of requests and answers of OpenAI's Responses API. Unknown fields are treated as in generation/types.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from ..generation.tool_types import MAX_TOOLS, CallId, ClientTool, DirectCallers, FunctionChoice, FunctionTool, ToolName
from ..generation.types import MessagePart, NumTokens, SessionKey

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputPart(MessagePart, frozen=True, forbid_unknown_fields=True):
    """A part of a message or of a function's output; only text. A part of type `refusal` is what a model said instead
    of an answer."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str


class MessageItem(Struct, frozen=True, forbid_unknown_fields=True):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    type: Literal["message"] | None = None


class ReasoningPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of thoughts, or of their summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Thoughts of the model. Without `content` the summary stands for them."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None


class CallItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call of a function that the model made. `arguments` is a JSON object as text."""

    type: Literal["function_call"]
    call_id: CallId
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: str
    input: str
    namespace: str | None = None


class CallOutputItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of an earlier tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: str | list[InputPart]


InputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem | CallOutputItem
INPUT_ITEMS: dict[str, type[InputItem]] = {  # by their `type`
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
}


class ResponseFunction(
    FunctionTool,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
    tag_field="type",
    tag="function",
):
    """A function. `allowed_callers` must hold `direct`."""

    allowed_callers: DirectCallers | None = None


class CustomFormat(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The language of a custom tool's input. The model reads a grammar as a part of the tool's description; nothing
    binds it to it."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class ResponseCustomTool(
    ClientTool,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
    tag_field="type",
    tag="custom",
):
    """A tool whose input is any text. The model sees a function with one argument, `input`."""

    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None
    allowed_callers: DirectCallers | None = None


class ToolNamespace(
    ClientTool,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
    tag_field="type",
    tag="namespace",
):
    """Tools under one name. The model sees each as NAMESPACE__NAME; `description` is not shown."""

    name: ToolName
    description: str | None = None
    tools: Annotated[list[ResponseFunction | ResponseCustomTool], Meta(max_length=MAX_TOOLS)]


ResponseTool = ResponseFunction | ResponseCustomTool | ToolNamespace


class ResponseNamedTool(FunctionChoice, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A choice of one tool, which must be called once."""

    type: Literal["function", "custom"]


ResponseToolChoice = Literal["none", "auto", "required"] | ResponseNamedTool


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Format of the text that the model writes. `schema` is always enforced: `strict` has no effect."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    schema: Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})] = field(default_factory=Raw)
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the text that the model writes."""

    format: TextFormat | None = None


class ReasoningConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the thoughts before the answer. `effort` reaches chat templates that know `reasoning_effort`, and has
    no effect on others; `none` also turns the thoughts off in templates that know `enable_thinking`."""

    effort: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class ResponsesStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Additional contents of a stream. None is served."""


class ResponsesRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses. No response is stored. Items of the input are decoded one by one, each by its type
    (INPUT_ITEMS)."""

    model: Annotated[str, Meta(max_length=256)]
    input: str | Annotated[list[Raw], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: SessionKey = None
    metadata: dict[str, Any] | None = None


class ResponseText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text that the model wrote."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ResponseThoughts(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Thoughts of the model."""

    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message that the model wrote."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[ResponseText]


class OutputReasoning(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Thoughts of the model before a message or a call. There are no summaries."""

    id: str
    status: Status
    summary: list[Any] = []
    content: list[ResponseThoughts]


class OutputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. `arguments` is a JSON object as text, or the beginning of one if the call is incomplete."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. `input` is empty until the call is whole."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class ResponseFault(Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputDetails(Struct, frozen=True):
    """`cached_tokens` of the input came from prefill's prefix cache. Those that went into it are not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """Tokens of the output that are not its text."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/responses."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    tool_choice: ResponseToolChoice
    tools: list[dict[str, Any]]
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, Any]


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """An event of a stream. `sequence_number` counts them. Its other fields depend on its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseAnswer | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: ResponseText | ResponseThoughts | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
