"""Bodies of requests and answers that follow Anthropic's API. Unknown fields are treated as in openai_types.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from .openai_types import MAX_STOPS, NumTokens, StopText, TextPart

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class MessageText(TextPart, frozen=True, forbid_unknown_fields=True):
    """A block of a message; only text. `cache_control` has no effect: prefixes are cached by themselves."""

    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class InputMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message. If the last one is the assistant's, the answer goes on from its text."""

    role: Literal["user", "assistant"]
    content: str | list[MessageText]


class OutputFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON schema that the text satisfies."""

    type: Literal["json_schema"]
    schema: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Format of the text that the model writes."""

    format: OutputFormat | None = None


class MessagesInput(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that messages and their count share."""

    model: Annotated[str, Meta(max_length=256)]
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)]
    system: str | list[MessageText] | None = None
    output_config: OutputConfig | None = None
    # NOT_SERVED
    thinking: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    # IGNORED
    cache_control: dict[str, Any] | None = None
    speed: str | None = None


class CountTokensRequest(MessagesInput, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""


class MessagesRequest(MessagesInput, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: NumTokens
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    # NOT_SERVED
    container: Any = None
    mcp_servers: list[Any] | None = None
    # IGNORED
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None


class TokenCount(Struct, frozen=True):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Token counts. `input_tokens` came neither from prefill's prefix cache nor went into it: those that came from it
    are `cache_read_input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class OutputText(Struct, frozen=True, tag_field="type", tag="text"):
    """A block of text that the model wrote."""

    text: str
    citations: None = None


class MessageAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Answer of POST /v1/messages."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputText]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    """First event of a stream: the message without its content."""

    message: MessageAnswer


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """Event before the text of a block."""

    index: int
    content_block: OutputText


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    """Event without a meaning."""


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text of a block."""

    text: str


class BlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """Event with more of a block."""

    index: int
    delta: TextDelta


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """Event after the text of a block."""

    index: int


class MessageEnd(Struct, frozen=True):
    """Why the text ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    """Event with the reason of the end and the final token counts."""

    delta: MessageEnd
    usage: MessageUsage | UnsetType = UNSET


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    """Last event of a stream."""


MessageEvent = MessageStart | BlockStart | Ping | BlockDelta | BlockStop | MessageDelta | MessageStop
