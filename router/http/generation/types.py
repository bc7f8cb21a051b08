"""Bodies of requests and answers that follow OpenAI's API, with extensions of vLLM and of Baton.

The types declare what is served. Decoding is strict, and `null` is accepted for optional fields. The table of
bodies/fields.py says what becomes of other fields that clients send. The OpenAPI document is generated from both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from ....metadata.wire.request import MAX_CHOICES, MAX_CONTEXT, MAX_DRAFT_STEPS, MAX_TOP_LOGPROBS, TokenId
from ...requests.delta import TokenText
from .tool_types import MAX_CALLS, CalledFunction, MadeCall, ToolCall, ToolCallDelta, ToolChoice, Tools

MAX_STOPS = 16
MAX_PROMPTS = 256

Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[
    dict[TokenId, Bias],
    Meta(max_length=4096, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
NumTokens = Annotated[int, Meta(ge=1, le=2**62)]
DraftSteps = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_DRAFT_STEPS)] | None,
    Meta(
        description="Tokens drafted per round of speculation for this request, at most as many as the decode node is "
        "configured for. 0: this request is not speculated; null or absent: as the node is configured. The value does "
        "not change the text."
    ),
]
ReturnMetrics = Annotated[
    bool | None,
    Meta(
        description="The answer, or the chunk of a stream that has the usage, has metrics.speculative_decoding: the "
        "counts of usage.speculation and a histogram, under vLLM's names. It is absent if there are several outputs or "
        "if nothing was drafted."
    ),
]
Priority = Annotated[
    Annotated[int, Meta(ge=-100, le=100)] | None,
    Meta(
        description="Waiting requests with lower numbers are served first, in the order of arrival within a priority; "
        "0 by default. Ten seconds of waiting make up for one step of priority, so that no request waits forever."
    ),
]
TimeoutS = Annotated[
    Annotated[float, Meta(gt=0)] | None,
    Meta(
        description="Seconds after which the answer is of no use: the request is then ended with status 504. If the "
        "router expects that it would take longer, it refuses it at once with 429. At most the router's "
        "--request-timeout-s."
    ),
]
Seed = Annotated[
    Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
    Meta(
        description="Requests with equal seeds, prompts and parameters get equal texts, on whatever nodes they run, up "
        "to ties of rounding; without a seed the router draws one."
    ),
]
Logprobs = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None,
    Meta(
        description="The answer has the log-probability of each token, and so many of the likeliest tokens at its "
        "position, by the model's own distribution: temperature, filters, penalties and grammars do not change them."
    ),
]
WantsLogprobs = Annotated[
    bool | None,
    Meta(
        description="The answer has the log-probability of each token, by the model's own distribution: temperature, "
        "filters, penalties and grammars do not change it."
    ),
]
TopLogprobs = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None,
    Meta(description="So many of the likeliest tokens at each position stand beside its token; needs `logprobs`."),
]
CacheSalt = Annotated[
    Annotated[str, Meta(max_length=1024)] | None,
    Meta(description="Only requests with the same salt share cached prefixes of their prompts."),
]
IgnoreEos = Annotated[
    bool | None, Meta(description="The tokens that end the model's texts do not end the output; excludes grammars.")
]
MinTokens = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] | None,
    Meta(description="No token and no stop string ends the output before so many tokens."),
]
IncludeStop = Annotated[bool | None, Meta(description="The stop string that ends the output stays in its text.")]
SkipSpecial = Annotated[bool | None, Meta(description="False: special tokens are shown in the text.")]
TokenIds = Annotated[
    bool | None, Meta(description="The answer also has the token ids of the prompt and of the output.")
]
ContinueFinal = Annotated[
    bool | None, Meta(description="The last message is not ended: the output continues its text.")
]
TemplateOptions = Annotated[
    dict[str, Any] | None, Meta(description="Further variables of the chat template, such as `enable_thinking`.")
]
BestOf = Annotated[
    Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
    Meta(description="Refused unless it equals `n`.", extra_json_schema={"deprecated": True}),
]
ThinkingBudget = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] | None,
    Meta(
        description="The most tokens of thoughts, without the marks around them. Then the thoughts are closed and the "
        "answer follows. No effect on a prompt after which the model does not think."
    ),
]
TruncatePrompt = Annotated[
    NumTokens | None,
    Meta(
        description="The beginning of the prompt is cut off so that at most so many tokens are left. They include the "
        "special tokens that the tokenizer adds, which are kept."
    ),
]
PromptOrOutput = Annotated[
    Annotated[int, Meta(ge=0, le=2**62)] | None,
    Meta(description="0 needs `echo`: the answer is then the prompt alone, scored if `logprobs` is set."),
]
Received = Annotated[
    Annotated[list[TokenId], Meta(max_length=MAX_CONTEXT)] | None,
    Meta(
        description="Output tokens of an earlier answer to this request, as `return_token_ids` gave them. The answer "
        "continues after them; `max_tokens` and the usage count them. With the seed of the earlier answer, its header "
        "x-baton-seed, the text is what that one would have been. One prompt and one output only."
    ),
]
SessionKey = Annotated[
    str | None, Meta(description="Requests of one key prefer the same nodes, unless a header names their session.")
]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
PARTS_NOT_SERVED = {  # type of a part of a message -> what it holds
    "audio_url": "audio parts",
    "document": "files",
    "file": "files",
    "image": "images",
    "image_url": "images",
    "input_audio": "audio parts",
    "input_file": "files",
    "input_image": "images",
    "search_result": "search results",
    "video_url": "videos",
}


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Additional contents of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_drafts: Annotated[
        bool | None,
        Meta(
            description="Baton's extension: chunks with new tokens have `drafts`, the text of each token, and whether "
            "it is an accepted draft. The texts join to the output before thoughts and calls are read. They are in the "
            "first of the chunks that the tokens bring."
        ),
    ] = None


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A JSON schema that the text satisfies."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    schema: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class TagStructure(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a text: `begin`, JSON of a schema, `end`."""

    begin: Annotated[str, Meta(min_length=1, max_length=1024)]
    schema: dict[str, Any] = {}
    end: Annotated[str, Meta(max_length=1024)] = ""


TagStructures = Annotated[list[TagStructure], Meta(min_length=1, max_length=256)]
Triggers = Annotated[list[StopText], Meta(min_length=1, max_length=256)]


class StructuralTag(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Free text with structures in it: once the model has written a trigger, the rest of a structure that begins with
    the trigger follows."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: TagStructures
    triggers: Triggers


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Format of the text that the model writes."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: TagStructures | None = None
    triggers: Triggers | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM's extension: the language of the text that the model writes, exactly one of these. `json` is a JSON schema;
    it and `structural_tag` may be written as a string. `grammar` is in Lark's or GBNF's notation. The white space
    between tokens of JSON, here and in `response_format` and calls, is none with `disable_any_whitespace`, or that of
    the regular expression `whitespace_pattern`. `disable_fallback` has no effect: there is one backend."""

    json: Annotated[Raw, Meta(extra_json_schema={"type": ["object", "string", "null"]})] = field(default_factory=Raw)
    json_object: bool | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[StopText], Meta(min_length=1, max_length=4096)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    structural_tag: StructuralTag | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    disable_fallback: bool | None = None


class CommonRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that completions and chat completions share."""

    model: Annotated[str, Meta(max_length=256)]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    seed: Seed = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's extensions
    structured_outputs: StructuredOutputs | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: IgnoreEos = None
    min_tokens: MinTokens = None
    include_stop_str_in_output: IncludeStop = None
    skip_special_tokens: SkipSpecial = None
    return_token_ids: TokenIds = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncatePrompt = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    prompt_cache_key: SessionKey = None
    # Baton's extensions
    draft_steps: DraftSteps = None
    return_metrics: ReturnMetrics = None
    timeout_s: TimeoutS = None


class CompletionRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: PromptOrOutput = None
    best_of: BestOf = None
    echo: bool | None = None
    logprobs: Logprobs = None
    received_token_ids: Received = None  # Baton's extension


class MessagePart(Struct, frozen=True):
    """Base of the parts of messages. Parts of PARTS_NOT_SERVED are refused as such."""


class TextPart(MessagePart, frozen=True, forbid_unknown_fields=True):
    """A part of a message; only text. The types are all read alike: clients of /v1/responses send the types of its
    parts, and `refusal` is what a model said instead of an answer."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message. `reasoning` is another name of `reasoning_content`. A `refusal` is read as text. `function_call` and
    the role `function` are the deprecated forms of `tool_calls` and the role `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    function_call: CalledFunction | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: NumTokens | None = None
    logprobs: WantsLogprobs = None
    top_logprobs: TopLogprobs = None
    add_generation_prompt: bool | None = None
    continue_final_message: ContinueFinal = None
    chat_template_kwargs: TemplateOptions = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    thinking_token_budget: ThinkingBudget = None  # vLLM's extension


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: either a prompt, or messages, which the chat template turns into a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


EXACTLY_ONE_OF: dict[type[Struct], tuple[str, ...]] = {TokenizeRequest: ("prompt", "messages")}


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """The ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_CONTEXT)]
    model: str | None = None


class DetokenizeResponse(Struct, frozen=True):
    """The text of ids, special tokens included."""

    prompt: str


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """Special tokens, sizes and chat template of a model's tokenizer, as its nodes report them. The names are those of
    Hugging Face's tokenizer_config.json."""

    model: str
    model_max_length: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    bos_token_id: int | None
    eos_token_ids: list[int]
    chat_template: str | None


class PromptTokensDetails(Struct, frozen=True):
    """`cached_tokens` of the prompt came from prefill's prefix cache."""

    cached_tokens: int


class SpeculationDetails(Struct, frozen=True, kw_only=True):
    """Result of speculation. `accept_length` is the mean number of tokens per verification, the target's included."""

    drafted_tokens: int
    accepted_tokens: int
    verify_count: int
    accept_length: float


class SpeculativeDecoding(Struct, frozen=True, kw_only=True):
    """Result of speculation for one output, as vLLM gives it. `acceptance_histogram`: how many verifications accepted
    0, 1, ... drafts, up to the longest draft, `num_spec_tokens`."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class AnswerMetrics(Struct, frozen=True):
    """Figures of an answer, present if `return_metrics` asks for them and a node speculated for its only output."""

    speculative_decoding: SpeculativeDecoding


class CompletionTokensDetails(Struct, frozen=True):
    """`reasoning_tokens` of the output are thoughts, with the marks around them."""

    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts. A prompt that several choices share counts once. `speculation` is present if a node speculated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    speculation: SpeculationDetails | None = None


class LegacyLogprobs(Struct, frozen=True):
    """Log-probabilities as /v1/completions gives them: columns over tokens; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    """A likely token; `bytes` is its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """A generated token and the likeliest tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities as /v1/chat/completions gives them."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A choice of /v1/completions, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    drafts: list[TokenText] | None = None  # of a chunk, if `stream_options.include_drafts` is set


class Completion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: AnswerMetrics | None = None


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """The message that the model wrote. `content` is null if there are only tool calls or thoughts. The thoughts are in
    `reasoning_content` or `reasoning`, as the router is configured."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A choice of /v1/chat/completions."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    metrics: AnswerMetrics | None = None


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """The part of a message that a chunk adds. The first chunk has the role."""

    content: str | None = None
    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A choice in a chunk of a chat stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    drafts: list[TokenText] | None = None  # if `stream_options.include_drafts` is set


class ChatChunk(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chunk of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | None = None
    metrics: AnswerMetrics | None = None


class CancelledRequest(Struct, frozen=True):
    """Answer of DELETE /v1/requests/{id}."""

    id: str
    cancelled: Literal[True] = True


class ModelInfo(Struct, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"


class ModelList(Struct, frozen=True):
    """Answer of /v1/models."""

    data: list[ModelInfo]
    object: Literal["list"] = "list"


class Version(Struct, frozen=True):
    """Answer of /version: Baton's version."""

    version: str


class ServedRoutes(Struct, frozen=True):
    """Answer of /v1: the routes that a client may use, such as `GET /v1/models`, and Baton's version."""

    version: str
    routes: list[str]
