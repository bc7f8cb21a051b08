"""Bodies of requests and answers that follow Anthropic's API. Unknown fields are treated as in generation/types.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from ....metadata.wire.request import MAX_CONTEXT
from ..generation.tool_types import MAX_TOOLS, CallId, ClientTool, DirectCallers, ToolName
from ..generation.types import MAX_STOPS, MessagePart, NumTokens, StopText, TextPart

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class MessageText(TextPart, frozen=True, forbid_unknown_fields=True):
    """A block where all are text."""

    type: Literal["text"]  # pyright: ignore[reportIncompatibleVariableOverride]
    text: str


class MessageBlock(MessagePart, frozen=True, tag_field="type", kw_only=True):
    """Base of the blocks of messages."""


class TextBlock(MessageBlock, frozen=True, forbid_unknown_fields=True, tag="text"):
    """A block of text."""

    text: str


class ToolUseBlock(MessageBlock, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="tool_use"):
    """A tool call that the model wrote."""

    id: CallId
    name: str
    input: dict[str, Any]


class ToolResultBlock(MessageBlock, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="tool_result"):
    """The result of a tool call; only text. If `is_error`, the model reads `Error: ` before it."""

    tool_use_id: CallId
    content: str | list[MessageText] | None = None
    is_error: bool | None = None


class ThinkingBlock(MessageBlock, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="thinking"):
    """Thoughts that the model wrote. They go to the chat template."""

    thinking: str


class RedactedBlock(MessageBlock, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="redacted_thinking"):
    """Thoughts of another server's model, encrypted. They are left out of the prompt."""

    data: str


class UserTurn(Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """A message of the user. The model reads the results of tools first, and then the text."""

    content: str | list[TextBlock | ToolResultBlock]


class AssistantTurn(Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """A message of the model. If it is the last one, it has no calls, and the answer goes on from its text."""

    content: str | list[TextBlock | ToolUseBlock | ThinkingBlock | RedactedBlock]


class OutputEffort(Struct, frozen=True, forbid_unknown_fields=True):
    """How long the model should think, for one turn."""

    effort: str | None = None


class SystemTurn(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="role", tag="system"):
    """A message of the system within the conversation. With `clear_at` next_user_message, the model reads it only until
    the user's next message."""

    content: str | list[MessageText] = ""
    clear_at: Literal["next_user_message", "never"] | None = None


Turn = UserTurn | AssistantTurn | SystemTurn


class CustomTool(ClientTool, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tool that the client runs. Its schema binds the model if a call is forced; `strict` has no further effect.
    `allowed_callers` must hold `direct`."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    allowed_callers: DirectCallers | None = None


class AutoChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    """The model may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class OneChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    """The model must call this tool, once."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """The model does not see the tools."""


ChoiceOfTools = AutoChoice | AnyChoice | OneChoice | NoChoice

ThoughtDisplay = Literal["summarized", "omitted", "updates"]  # all but omitted: thoughts are given, unabridged
Effort = Literal["low", "medium", "high", "xhigh", "max"]


class ThinkingEnabled(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="enabled"):
    """The model thinks before it answers, at most so many tokens, without the marks around its thoughts."""

    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    display: ThoughtDisplay | None = None


class ThinkingAdaptive(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    """The model thinks before it answers, if it can."""

    display: ThoughtDisplay | None = None


class ThinkingDisabled(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    """The model does not think, if its chat template can tell it so."""


ThinkingConfig = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class OutputFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON schema that the text satisfies."""

    type: Literal["json_schema"]
    schema: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Format of the text that the model writes, and how long it should think. `effort` reaches chat templates that know
    `reasoning_effort`, xhigh and max as high; it has no effect on others."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class ContextEdit(Struct, frozen=True):
    """An edit of a long conversation. None is made."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]


class ContextManagement(Struct, frozen=True, forbid_unknown_fields=True):
    """Edits of a long conversation."""

    edits: list[ContextEdit] | None = None


class MessagesInput(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that messages and their count share."""

    model: Annotated[str, Meta(max_length=256)]
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=4096)]
    system: str | list[MessageText] | None = None
    output_config: OutputConfig | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChoiceOfTools | None = None
    thinking: ThinkingConfig | None = None


class CountTokensRequest(MessagesInput, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""


class MessagesRequest(MessagesInput, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages. An output that reaches the end of the context ends there, also before `max_tokens`."""

    max_tokens: NumTokens
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class TokenCount(Struct, frozen=True):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class ThinkingTokens(Struct, frozen=True):
    """`thinking_tokens` of the output are thoughts, with the marks around them."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Token counts of a whole stream. `input_tokens` came neither from prefill's prefix cache nor went into it: those
    that came from it are `cache_read_input_tokens`. Anthropic's API always sends the fields that are null here."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    server_tool_use: None = None


class WholeUsage(MessageUsage, frozen=True, kw_only=True):
    """Token counts of a message."""

    cache_creation: None = None
    inference_geo: None = None
    service_tier: None = None
    speed: None = None


class OutputText(Struct, frozen=True, tag_field="type", tag="text"):
    """A block of text that the model wrote. It has no `citations`: clients refuse them if they are null."""

    text: str


class OutputThinking(Struct, frozen=True, tag_field="type", tag="thinking"):
    """A block of thoughts. Clients need `signature`, which is empty."""

    thinking: str
    signature: str = ""


class DirectCaller(Struct, frozen=True, tag_field="type", tag="direct"):
    """The model itself made the call."""


class OutputToolUse(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A block of one tool call."""

    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
    caller: DirectCaller = DirectCaller()


OutputBlock = OutputText | OutputThinking | OutputToolUse


class MessageAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Answer of POST /v1/messages. Blocks are in the order in which the model wrote them. Anthropic's API always sends
    the fields that are null here."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    container: None = None
    diagnostics: None = None
    stop_details: None = None
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: WholeUsage


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    """First event of a stream: the message without its content."""

    message: MessageAnswer


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    """Event without a meaning."""


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """Event before the contents of a block, which is empty in it."""

    index: int
    content_block: OutputBlock


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text of a block."""

    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More thoughts of a block."""

    thinking: str


class SignatureDelta(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The signature of a block of thoughts, which is empty."""

    signature: str = ""


class InputDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of the input of a tool call, which is JSON as text."""

    partial_json: str


class BlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """Event with more of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """Event after the contents of a block. The input of a tool call may be incomplete: then it is no call."""

    index: int


class MessageEnd(Struct, frozen=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    """Event with the reason of the end and the final token counts."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    """Last event of a stream."""


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | Ping | BlockEvent | MessageDelta | MessageStop


class AnthropicModel(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """A model that is served, as Anthropic's API describes it. That API always sends the fields that are null here."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"
    capabilities: None = None
    deprecated_at: None = None
    line: None = None
    retires_at: None = None


class AnthropicModelList(Struct, frozen=True, kw_only=True):
    """Answer of /v1/models to a client that sends the header anthropic-version: one page with all models."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False

    @classmethod
    def of(cls, models: list[AnthropicModel]) -> AnthropicModelList:
        """Return the page of these models."""
        ids = [model.id for model in models]
        return cls(data=models, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)
