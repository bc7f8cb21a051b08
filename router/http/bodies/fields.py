"""Table of fields that clients send and that ask for nothing here, for something under another name, or for something
that is not served. All routes use it.

    Ignored     it has no effect on the text; `why` says why that is safe
    Renamed     it is served as the field `to`: a name, or a name within an object
    Merged      its own fields stand for fields of the body
    Converted   `convert` returns the fields that it stands for
    NotServed   the answer would differ, so it is refused with `words`, except for values that ask for nothing

Fields that most clients send are declared in the types of the bodies, so that strict decoding takes them. The others
are looked up here when strict decoding has refused a body (refused_bodies.py). A field that is neither declared nor
listed here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, cast

from msgspec import Struct

from ....metadata.errors import RequestError
from ...errors import ThreadRefused
from ..anthropic.types import (
    AssistantTurn,
    CustomTool,
    MessageBlock,
    MessagesInput,
    MessagesRequest,
    OutputConfig,
    SystemTurn,
    UserTurn,
)
from ..generation.tool_types import CalledFunction, FunctionTool, Tool, ToolCall, ToolChoiceObject
from ..generation.types import (
    ChatMessage,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    JsonSchemaFormat,
    StructuredOutputs,
    TextPart,
)
from ..responses.types import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    InputPart,
    MessageItem,
    ReasoningConfig,
    ReasoningItem,
    ResponseCustomTool,
    ResponseFunction,
    ResponseNamedTool,
    ResponsesRequest,
    TextConfig,
)


class Ignored(NamedTuple):
    """Fields without effect."""

    names: str
    why: str


class Renamed(NamedTuple):
    """A field that is served under another name."""

    name: str
    to: str


class Merged(NamedTuple):
    """A field whose own fields stand for fields of the body."""

    name: str


class Converted(NamedTuple):
    """A field that stands for others. `convert` takes its value and the rest of the body."""

    name: str
    to: str
    convert: Callable[[Any, Mapping[str, Any]], dict[str, Any]]


class NotServed(NamedTuple):
    """A field that asks for something that Baton cannot do. The values `accepted` ask for nothing."""

    name: str
    words: str
    accepted: tuple[Any, ...] = (None, [])
    error: type[RequestError] = RequestError


Rule = Ignored | Renamed | Merged | Converted | NotServed


def _openrouter_reasoning(value: Any, _body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenRouter's `reasoning`."""
    if not isinstance(value, dict):
        raise RequestError("reasoning: it must be an object", param="reasoning")
    given = cast("dict[str, Any]", value)
    if unknown := sorted(given.keys() - {"effort", "max_tokens", "enabled", "exclude", "summary"}):
        raise RequestError(f"reasoning.{unknown[0]}: unknown field", param="reasoning")
    if given.get("exclude"):
        raise RequestError("reasoning.exclude: thoughts are part of every answer", param="reasoning")
    fields = {"reasoning_effort": given.get("effort"), "thinking_token_budget": given.get("max_tokens")}
    if given.get("enabled") is not None and fields["reasoning_effort"] != "none":
        fields["chat_template_kwargs.enable_thinking"] = given["enabled"]
    return fields


def _thinking(value: Any, _body: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's `thinking`, which DeepSeek's and GLM's clients send to chat completions."""
    given = cast("dict[str, Any]", value) if isinstance(value, dict) else {"type": value}
    if given.get("type") not in ("enabled", "adaptive", "disabled"):
        raise RequestError("thinking.type: it must be enabled, adaptive or disabled", param="thinking")
    return {
        "chat_template_kwargs.enable_thinking": given["type"] != "disabled",
        "thinking_token_budget": given.get("budget_tokens"),
    }


def _usage(value: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenRouter's `usage`: a stream has the counts if it asks for them."""
    wants = isinstance(value, dict) and bool(cast("dict[str, Any]", value).get("include"))
    return {"stream_options.include_usage": True} if wants and body.get("stream") else {}


_PLACE = "it chooses where a request runs, which the router does; the text does not depend on that"
_NAME = "it names the request for logs; the header x-request-id does that here"
_CACHE = "prefixes are cached by themselves, and the text does not depend on that"
_OWNER = "it names the caller for the provider's records"
_BILLING = "it chooses a price or a provider; there is one server here"
_COUNTS = "it asks for times or counts beside the text"
_SPECULATION = "drafts never change the text; draft_steps bounds them"
_HISTORY = "clients send it back with what the model wrote; chat templates have no place for it"
_STRICT = "a schema that binds the model is always enforced"
_SAMPLER = "this sampler is not served; leave it out"

_TABLE: tuple[tuple[tuple[type[Struct], ...], tuple[Rule, ...]], ...] = (
    (
        (CommonRequest, MessagesInput, ResponsesRequest),
        (
            Ignored("session_id conversation_id chat_id data_parallel_rank routed_dp_rank id_slot", _PLACE),
            Ignored("kv_transfer_params bootstrap_host bootstrap_port bootstrap_room backend_instance_id", _PLACE),
            Ignored("agent_hints agent_context session_control keep_alive ttl", _PLACE),
            Ignored("request_id rid trace trace_id tags litellm_metadata litellm_call_id generation_name", _NAME),
            Ignored("user safety_identifier metadata user_id user_profile_id workspace_id", _OWNER),
            Ignored("store", "nothing is stored"),
            Ignored("prompt_cache_options prompt_cache_retention cache_prompt", _CACHE),
            Ignored("service_tier provider route models fallbacks fallback_credit_token billing_policy", _BILLING),
            Ignored("inference_geo speed client_metadata diagnostics betas access_programs", _BILLING),
            Ignored("cache_control", _CACHE),
            NotServed("plugins", "plugins are not served"),
            NotServed("transforms", "prompts are not shortened; send a shorter one"),
            NotServed("moderation", "texts are not moderated", (None,)),
        ),
    ),
    (
        (CommonRequest,),
        (
            Ignored("timings_per_token return_progress return_cached_tokens_details extra_fields", _COUNTS),
            Ignored("draft_model speculative.n_max speculative.n_min speculative.p_min", _SPECULATION),
            Ignored("n_keep n_discard num_ctx", "the whole prompt is read, or the request is refused"),
            Ignored("guided_decoding_backend", "there is one backend, llguidance"),
            Ignored("tool_stream", "calls are always streamed"),
            Merged("nvext"),
            Merged("extra_body"),
            Converted("usage", "stream_options.include_usage", _usage),
            Renamed("max_new_tokens", "max_tokens"),
            Renamed("n_predict", "max_tokens"),
            Renamed("num_predict", "max_tokens"),
            Renamed("min_new_tokens", "min_tokens"),
            Renamed("repeat_penalty", "repetition_penalty"),
            Renamed("random_seed", "seed"),
            Renamed("no_stop_trim", "include_stop_str_in_output"),
            Renamed("extra_key", "cache_salt"),
            Renamed("guided_json", "structured_outputs.json"),
            Renamed("guided_json_object", "structured_outputs.json_object"),
            Renamed("guided_regex", "structured_outputs.regex"),
            Renamed("guided_choice", "structured_outputs.choice"),
            Renamed("guided_grammar", "structured_outputs.grammar"),
            Renamed("guided_whitespace_pattern", "structured_outputs.whitespace_pattern"),
            Renamed("json_schema", "structured_outputs.json"),
            Renamed("regex", "structured_outputs.regex"),
            Renamed("ebnf", "structured_outputs.grammar"),
            Renamed("grammar", "structured_outputs.grammar"),
            NotServed("bad_words", "words cannot be banned; logit_bias makes single tokens unlikely"),
            NotServed("detokenize", "every answer has its text; return_token_ids adds the ids", (None, True)),
            NotServed(
                "prompt_logprobs", "a prompt is scored by echo with logprobs on /v1/completions, without ranks", (None,)
            ),
            NotServed("allowed_token_ids", "tokens cannot be allowed by id; structured_outputs binds the text"),
            NotServed("use_beam_search", "beams are not served; n gives several samples", (None, False)),
            NotServed("num_beams", "beams are not served; n gives several samples", (None, 1)),
            NotServed("length_penalty", "beams are not served", (None, 1)),
            NotServed("early_stopping", "beams are not served", (None, False)),
            NotServed("logits_processors", "processors of logits are not served"),
            NotServed("custom_logit_processor", "processors of logits are not served", (None,)),
            NotServed("custom_params", "processors of logits are not served", (None, {})),
            NotServed("vllm_xargs", "the server has no extensions", (None, {})),
            NotServed("mm_processor_kwargs", "only text is served", (None, {})),
            NotServed("image_data", "only text is served"),
            NotServed("prompt_embeds", "a prompt is given as text or token ids", (None,)),
            NotServed("input_ids", "/v1/completions takes token ids as its prompt", (None,)),
            NotServed("lora", "adapters are not chosen per request"),
            NotServed("lora_path", "adapters are not chosen per request", (None,)),
            NotServed("adapter_id", "adapters are not chosen per request", (None,)),
            NotServed("session_params", "conversations are not stored; send all messages", (None, {})),
            NotServed("spaces_between_special_tokens", "special tokens are joined as the tokenizer does", (None, True)),
            NotServed("return_tokens_as_token_ids", "return_token_ids adds the ids", (None, False)),
            NotServed("return_hidden_states", "hidden states are not given", (None, False)),
            NotServed("return_routed_experts", "experts are not given", (None, False)),
            NotServed("return_full_text", "echo returns the prompt on /v1/completions", (None, False)),
            NotServed("n_probs", "logprobs, with top_logprobs in a chat, gives them", (None, 0)),
            NotServed("stop_regex", "stop takes texts"),
            NotServed("eos_token_id", "the field is stop_token_ids", (None,)),
            NotServed("do_sample", "temperature: 0 turns sampling off", (None, True)),
            NotServed("greed_sampling", "temperature: 0 turns sampling off", (None, False)),
            NotServed("use_raw_prompt", "/v1/completions takes a prompt as it is", (None, False)),
            NotServed("annotations", "streams have no further events"),
            NotServed("samplers", "the order of the samplers is fixed", (None,)),
            NotServed("mirostat", _SAMPLER, (None, 0)),
            NotServed("typical_p", _SAMPLER, (None, 1)),
            NotServed("tfs_z", _SAMPLER, (None, 1)),
            NotServed("top_a", _SAMPLER, (None, 0)),
            NotServed("dynatemp_range", _SAMPLER, (None, 0)),
            NotServed("xtc_probability", _SAMPLER, (None, 0)),
            NotServed("dry_multiplier", _SAMPLER, (None, 0)),
            NotServed("no_repeat_ngram_size", _SAMPLER, (None, 0)),
            NotServed("repeat_last_n", "repetitions count in the whole text", (None, -1)),
            NotServed("watermark", "texts are not marked", (None, False)),
            NotServed("t_max_predict_ms", "the field is timeout_s", (None,)),
            NotServed("options", "their fields stand in the body itself", (None, {})),
            NotServed("format", "the field is response_format", (None, "")),
        ),
    ),
    (
        (CompletionRequest,),
        (NotServed("suffix", "insertion is not served", (None, "")),),
    ),
    (
        (ChatRequest,),
        (
            Ignored("verbosity", "models have no such setting; /v1/responses ignores it as well"),
            Ignored("reasoning_summary", "thoughts are given as they are, without summaries"),
            Converted("reasoning", "reasoning_effort, thinking_token_budget", _openrouter_reasoning),
            Converted("thinking", "chat_template_kwargs.enable_thinking, thinking_token_budget", _thinking),
            Renamed("enable_thinking", "chat_template_kwargs.enable_thinking"),
            Renamed("preserve_thinking", "chat_template_kwargs.preserve_thinking"),
            Renamed("thinking_budget", "thinking_token_budget"),
            Renamed("max_thinking_tokens", "thinking_token_budget"),
            Renamed("thinking_budget_tokens", "thinking_token_budget"),
            NotServed("functions", "functions are given as tools"),
            NotServed("function_call", "the choice of a function is given as tool_choice", (None, [], "none")),
            NotServed("audio", "only text is served"),
            NotServed("prediction", "predicted outputs are not served"),
            NotServed("web_search_options", "there is no web search"),
            NotServed("enable_search", "there is no web search", (None, False)),
            NotServed("search_parameters", "there is no web search", (None, {})),
            NotServed("modalities", "only text is served", (None, [], ["text"])),
            NotServed("separate_reasoning", "--reasoning-parser none leaves thoughts in the text", (None, True)),
            NotServed("stream_reasoning", "thoughts are streamed as they come", (None, True)),
            NotServed("include_reasoning", "thoughts are part of every answer", (None, True)),
            NotServed("reasoning_split", "--reasoning-parser none leaves thoughts in the text", (None, True)),
            NotServed(
                "reasoning_format", "--reasoning-parser decides about thoughts", (None, "auto", "deepseek", "parsed")
            ),
            NotServed("echo", "/v1/completions returns prompts", (None, False)),
            NotServed("documents", "documents are given in a message"),
            NotServed("chat_template", "the model's own template is used", (None,)),
            NotServed("tool_prompt", "the model's own template is used", (None,)),
            NotServed("prompt_mode", "the model's own template is used; reasoning_effort and thinking set it", (None,)),
            NotServed("safe_prompt", "the system's message is not changed", (None, False)),
            NotServed("parse_tool_calls", "tool_choice: none leaves calls unread", (None, True)),
        ),
    ),
    (
        (MessagesInput,),
        (
            Ignored("prompt_cache_key", _CACHE),
            NotServed("compaction", "conversations are not summarized; send a shorter one", (None,)),
            NotServed("mcp_servers", "tools of MCP servers are not served; the client runs all tools"),
        ),
    ),
    (
        (MessagesRequest,),
        (
            NotServed("container", "containers are not served", (None,)),
            NotServed("thread", "conversations are not stored; send all messages", (None,), ThreadRefused),
        ),
    ),
    (
        (ResponsesRequest,),
        (
            NotServed("background", "responses are not computed in the background", (None, False)),
            NotServed("context_management", "contexts are not managed"),
            NotServed("conversation", "conversations are not stored; send the messages in `input`", (None,)),
            NotServed("image", "images are not served", (None,)),
            NotServed("max_tool_calls", "calls are not counted; parallel_tool_calls: false allows one", (None,)),
            NotServed("previous_response_id", "responses are not stored; send the messages in `input`", (None,)),
            NotServed("prompt", "prompts are not stored", (None,)),
            NotServed("store", "responses are not stored", (None, False)),
            NotServed("top_logprobs", "log-probabilities are served by /v1/chat/completions", (None, 0)),
            NotServed("reasoning_effort", "the field is reasoning.effort", (None,)),
        ),
    ),
    (
        (ChatMessage, UserTurn, AssistantTurn, SystemTurn),
        (
            Ignored("id type created created_at timestamp status phase model metadata", _HISTORY),
            Ignored(
                "finish_reason stop_reason stop_sequence stop_details usage logprobs token_ids container", _HISTORY
            ),
            Ignored("cache_control copilot_cache_control", _CACHE),
        ),
    ),
    (
        (ChatMessage,),
        (
            Ignored("reasoning_details thinking_blocks reasoning_opaque thought_signature signature", _HISTORY),
            Ignored("extra_content provider_specific_fields annotations citations parsed", _HISTORY),
            Renamed("reasoning_text", "reasoning_content"),
            Renamed("thinking", "reasoning_content"),
            NotServed("images", "images are not served"),
            NotServed("prefix", "the field is continue_final_message, of the body", (None, False)),
            NotServed("partial", "the field is continue_final_message, of the body", (None, False)),
        ),
    ),
    (
        (TextPart, MessageBlock, InputPart),
        (
            Ignored("id index annotations citations logprobs phase signature thought_signature", _HISTORY),
            Ignored("extra_content provider_specific_fields prompt_cache_breakpoint", _HISTORY),
            Ignored("cache_control copilot_cache_control", _CACHE),
            Ignored("caller toolset_name", _HISTORY),
        ),
    ),
    ((TextPart, InputPart), (Renamed("refusal", "text"),)),
    (
        (ToolCall, CalledFunction),
        (
            Ignored("id index type status caller description strict", _HISTORY),
            Ignored("extra_content provider_specific_fields thought_signature parsed_arguments", _HISTORY),
        ),
    ),
    (
        (Tool, FunctionTool, CustomTool, ResponseFunction, ResponseCustomTool),
        (
            Ignored("cache_control copilot_cache_control", _CACHE),
            Ignored("strict", _STRICT),
            Ignored("defer_loading eager_input_streaming", "the model sees every tool at once"),
            Ignored("input_examples output_schema", "chat templates have no place for it"),
            NotServed("allowed_callers", "only the model calls tools; add 'direct'", (None, ["direct"])),
            NotServed("async", "a call is answered before the model goes on", (None, False)),
        ),
    ),
    (
        (Tool,),
        (
            Renamed("name", "function.name"),
            Renamed("description", "function.description"),
            Renamed("parameters", "function.parameters"),
            Renamed("input_schema", "function.parameters"),
        ),
    ),
    ((ResponseFunction, ResponseNamedTool), (Merged("function"),)),
    (
        (ToolChoiceObject,),
        (
            Renamed("name", "function.name"),
            NotServed(
                "disable_parallel_tool_use",
                "set parallel_tool_calls of the body to false",
                (None, False),
            ),
        ),
    ),
    (
        (JsonSchemaFormat, StructuredOutputs),
        (
            Ignored("strict", _STRICT),
            Ignored("disable_fallback backend", "there is one backend, llguidance"),
        ),
    ),
    ((TextConfig,), (Ignored("verbosity", "models have no such setting"),)),
    (
        (ReasoningConfig,),
        (NotServed("mode", "there is one mode; effort sets the thoughts", (None, "standard")),),
    ),
    ((OutputConfig,), (NotServed("task_budget", "the model knows no budget; max_tokens bounds an answer", (None,)),)),
    ((CallOutputItem,), (Ignored("name", "the call before it has the name"),)),
    (
        (MessageItem, ReasoningItem, CallItem, CustomCallItem, CallOutputItem),
        (
            Ignored(
                "id status phase created_by caller async namespace internal_chat_message_metadata_passthrough", _HISTORY
            ),
            Ignored("provider_specific_fields extra_content metadata", _HISTORY),
        ),
    ),
)


@cache
def rules_of(kind: type[Struct]) -> dict[str, Rule]:
    """Return the rules for the fields of an object of this type, by their names. A rule of a later group goes before
    that of an earlier one."""
    rules: dict[str, Rule] = {}
    for kinds, group in _TABLE:
        if issubclass(kind, kinds):
            for rule in group:
                rules.update(dict.fromkeys(rule.names.split() if isinstance(rule, Ignored) else [rule.name], rule))
    return rules


@cache
def _declared_refusals(kind: type[Struct]) -> tuple[NotServed, ...]:
    known = kind.__struct_fields__
    return tuple(rule for name, rule in rules_of(kind).items() if name in known and isinstance(rule, NotServed))


def check_served(body: Struct) -> None:
    """Raise RequestError for a field that asks for something that Baton does not serve."""
    for rule in _declared_refusals(type(body)):
        check_value(rule, getattr(body, rule.name), rule.name)


def check_value(rule: NotServed, value: Any, path: str) -> None:
    """Raise RequestError if the value of a field, which a path leads to, asks for what is not served."""
    if value not in rule.accepted:
        raise rule.error(f"{path}: {rule.words}", param=path.partition(".")[0].partition("[")[0])
