"""Bodies of requests and answers of OpenAI's Responses API. Unknown fields are treated as in openai_types.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from .openai_types import MessagePart, NumTokens

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputPart(MessagePart, frozen=True, forbid_unknown_fields=True):
    """A part of a message; only text. The fields beside it come back with messages that the model wrote."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Struct, frozen=True, forbid_unknown_fields=True):
    """One message. The fields beside its role and content come back with messages that the model wrote."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


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
    """Settings of the thoughts before the answer, which are left out of it."""

    effort: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class ResponsesStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_obfuscation` has no effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses. No response is stored."""

    model: Annotated[str, Meta(max_length=256)]
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    reasoning: ReasoningConfig | None = None
    # NOT_SERVED
    background: bool | None = None
    context_management: list[Any] | None = None
    conversation: Any = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt: Any = None
    store: bool | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    # IGNORED
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


class ResponseText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text that the model wrote."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The message that the model wrote."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[ResponseText]


class ResponseFault(Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputDetails(Struct, frozen=True):
    """`cached_tokens` of the input came from prefill's prefix cache."""

    cached_tokens: int


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
    output: list[OutputMessage]
    usage: ResponseUsage | None
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: Literal[False] = False
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = []
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, Any]


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """An event of a stream. `sequence_number` counts them. Its other fields depend on its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
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
    item: OutputMessage | UnsetType = UNSET
    part: ResponseText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
