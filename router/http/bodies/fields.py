"""Table of fields that clients send and that the types of the bodies do not declare. All routes use it. An entry says
what the router does with the field:

    Ignored     it has no effect on the text; `why` says why that is safe
    Renamed     it is served as the field `to`: a name, or a name within an object
    Merged      its own fields stand for fields of the body
    Converted   `convert` returns the fields that it stands for
    NotServed   the answer would differ, so it is refused with `words`, except for values that ask for nothing

The types of the bodies declare what is served, and nothing else. `sent_type` adds to a type the fields of this table
that have no effect, and to a body those that are not served. So strict decoding takes what most clients send.
`check_served` then refuses a body. Other fields are looked up here when strict decoding has refused a body
(refused_bodies.py). A field that is neither declared nor listed here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct, defstruct, structs

from ....metadata.errors import RequestError
from ...errors import ThreadRefused
from ..anthropic.types import (
    AssistantTurn,
    ContextManagement,
    CustomTool,
    MessageBlock,
    MessagesInput,
    MessagesRequest,
    MessageText,
    OutputConfig,
    OutputEffort,
    SystemTurn,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingEnabled,
    ToolUseBlock,
    UserTurn,
)
from ..generation.tool_types import CalledFunction, FunctionTool, Tool, ToolCall, ToolChoiceObject
from ..generation.types import (
    ChatMessage,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    JsonSchemaFormat,
    StreamOptions,
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
    ResponsesStreamOptions,
    TextConfig,
)


class Ignored(NamedTuple):
    """Fields without effect. A value that is neither null nor of type `kind` is refused."""

    names: str
    why: str
    kind: Any = Any


class Renamed(NamedTuple):
    """Fields that are served under another name. `since`: the release, such as "0.2", that deprecated the names."""

    names: str
    to: str
    since: str | None = None


class Merged(NamedTuple):
    """Fields whose own fields stand for fields of the body."""

    names: str


class Converted(NamedTuple):
    """Fields that stand for others. `convert` takes the value and the rest of the body."""

    names: str
    to: str
    convert: Callable[[Any, Mapping[str, Any]], dict[str, Any]]


class NotServed(NamedTuple):
    """Fields that ask for something that Baton cannot do. The values `accepted` ask for nothing. A body with a value
    that is neither null nor of type `kind` is refused for that."""

    names: str
    words: str
    accepted: tuple[Any, ...] = (None, [])
    error: type[RequestError] = RequestError
    kind: Any = Any


Rule = Ignored | Renamed | Merged | Converted | NotServed


def _openrouter_reasoning(value: Any, _body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenRouter's `reasoning`."""
    if not isinstance(value, dict):
        raise RequestError("reasoning: it must be an object", param="reasoning")
    given = cast("dict[str, Any]", value)
    if unknown := sorted(given.keys() - {"effort", "max_tokens", "enabled", "exclude", "summary"}):
        raise RequestError(f"reasoning.{unknown[0]}: unknown field", param="reasoning")
    if given.get("exclude"):
        raise RequestError(
            "reasoning.exclude: thoughts are part of every answer; leave it out, and drop them on arrival",
            param="reasoning",
        )
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
_AT_ONCE = "the model sees every tool at once"
_AS_THEY_ARE = "thoughts are given as they are, without summaries"
_Object = dict[str, Any]
_Included = Literal[  # results of tools that no response has, and thoughts, which are given as they are
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]

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
        (CommonRequest, ResponsesRequest),
        (
            Ignored("user safety_identifier", _OWNER, str),
            Ignored("service_tier", _BILLING, str),
            Ignored("prompt_cache_retention", _CACHE, str),
            Ignored("prompt_cache_options", _CACHE, _Object),
        ),
    ),
    ((CommonRequest, MessagesRequest), (Ignored("metadata", _OWNER, _Object),)),
    (
        (CommonRequest,),
        (
            Ignored("store", "nothing is stored", bool),
            Ignored("timings_per_token return_progress return_cached_tokens_details extra_fields", _COUNTS),
            Ignored("draft_model speculative.n_max speculative.n_min speculative.p_min", _SPECULATION),
            Ignored("n_keep n_discard num_ctx", "the whole prompt is read, or the request is refused"),
            Ignored("guided_decoding_backend", "there is one backend, llguidance"),
            Ignored("tool_stream", "calls are always streamed"),
            Merged("nvext extra_body"),
            Converted("usage", "stream_options.include_usage", _usage),
            Renamed("max_new_tokens n_predict num_predict", "max_tokens"),
            Renamed("min_new_tokens", "min_tokens"),
            Renamed("repeat_penalty", "repetition_penalty"),
            Renamed("random_seed", "seed"),
            Renamed("no_stop_trim", "include_stop_str_in_output"),
            Renamed("extra_key", "cache_salt"),
            Renamed("guided_json json_schema", "structured_outputs.json"),
            Renamed("guided_json_object", "structured_outputs.json_object"),
            Renamed("guided_regex regex", "structured_outputs.regex"),
            Renamed("guided_choice", "structured_outputs.choice"),
            Renamed("guided_grammar ebnf grammar", "structured_outputs.grammar"),
            Renamed("guided_whitespace_pattern", "structured_outputs.whitespace_pattern"),
            NotServed("bad_words", "words cannot be banned; logit_bias makes single tokens unlikely"),
            NotServed(
                "detokenize", "every answer has its text; return_token_ids adds the ids", (None, True), kind=bool
            ),
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
            NotServed("lora_path adapter_id", "adapters are not chosen per request", (None,)),
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
            NotServed("mirostat top_a dynatemp_range xtc_probability dry_multiplier", _SAMPLER, (None, 0)),
            NotServed("typical_p tfs_z", _SAMPLER, (None, 1)),
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
            Ignored("verbosity", "models have no such setting; /v1/responses ignores it as well", str),
            Ignored("reasoning_summary", _AS_THEY_ARE),
            Converted("reasoning", "reasoning_effort, thinking_token_budget", _openrouter_reasoning),
            Converted("thinking", "chat_template_kwargs.enable_thinking, thinking_token_budget", _thinking),
            Renamed("enable_thinking", "chat_template_kwargs.enable_thinking"),
            Renamed("preserve_thinking", "chat_template_kwargs.preserve_thinking"),
            Renamed("thinking_budget max_thinking_tokens thinking_budget_tokens", "thinking_token_budget"),
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
            NotServed("chat_template tool_prompt", "the model's own template is used", (None,)),
            NotServed("prompt_mode", "the model's own template is used; reasoning_effort and thinking set it", (None,)),
            NotServed("safe_prompt", "the system's message is not changed", (None, False)),
            NotServed("parse_tool_calls", "tool_choice: none leaves calls unread", (None, True)),
        ),
    ),
    (
        (MessagesInput,),
        (
            Ignored("prompt_cache_key", _CACHE),
            Ignored("cache_control", _CACHE, _Object),
            Ignored("speed", _BILLING, str),
            Ignored("context_management", "no edit is made: the model reads the whole conversation", ContextManagement),
            NotServed("compaction", "conversations are not summarized; send a shorter one", (None,)),
            NotServed("mcp_servers", "tools of MCP servers are not served; the client runs all tools"),
        ),
    ),
    (
        (MessagesRequest,),
        (
            Ignored("service_tier inference_geo", _BILLING, str),
            Ignored("diagnostics", _BILLING, _Object),
            NotServed("container", "containers are not served", (None,)),
            NotServed("thread", "conversations are not stored; send all messages", (None,), ThreadRefused),
        ),
    ),
    (
        (ResponsesRequest,),
        (
            Ignored("client_metadata", _BILLING, _Object),
            Ignored("include", "all that a response has is given", list[_Included]),
            Ignored(
                "truncation", "an input that is too long is refused; send a shorter one", Literal["auto", "disabled"]
            ),
            NotServed("background", "responses are not computed in the background", (None, False), kind=bool),
            NotServed("context_management", "contexts are not managed"),
            NotServed("conversation", "conversations are not stored; send the messages in `input`", (None,)),
            NotServed("image", "images are not served", (None,)),
            NotServed("max_tool_calls", "calls are not counted; parallel_tool_calls: false allows one", (None,)),
            NotServed("previous_response_id", "responses are not stored; send the messages in `input`", (None,)),
            NotServed("prompt", "prompts are not stored", (None,)),
            NotServed("store", "responses are not stored", (None, False), kind=bool),
            NotServed("top_logprobs", "log-probabilities are served by /v1/chat/completions", (None, 0), kind=int),
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
            Ignored("extra_content citations parsed", _HISTORY),
            Ignored("annotations", _HISTORY, list[Any]),
            Ignored("provider_specific_fields", _HISTORY, _Object),
            Ignored("audio", "only text is served", NoneType),
            Renamed("reasoning_text thinking", "reasoning_content"),
            NotServed("images", "images are not served"),
            NotServed("prefix partial", "the field is continue_final_message, of the body", (None, False)),
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
    ((TextPart, MessageBlock), (Ignored("cache_control", _CACHE, _Object),)),
    ((MessageText, TextBlock), (Ignored("citations", _HISTORY, list[Any]),)),
    ((InputPart,), (Ignored("annotations logprobs", _HISTORY, list[Any]), Ignored("parsed", _HISTORY))),
    ((ToolUseBlock,), (Ignored("caller", _HISTORY, _Object),)),
    ((ThinkingBlock,), (Ignored("signature", "it is not checked", str),)),
    ((SystemTurn,), (Ignored("output_config", "how long to think is not set for one turn", OutputEffort),)),
    ((ThinkingEnabled, ThinkingAdaptive), (Ignored("block_binding", "signatures are not checked", _Object),)),
    (
        (ToolCall, CalledFunction),
        (
            Ignored("id index type status caller description strict", _HISTORY),
            Ignored("extra_content provider_specific_fields thought_signature parsed_arguments", _HISTORY),
        ),
    ),
    ((ToolCall,), (Ignored("index", "clients send streamed calls back", int),)),
    (
        (Tool, FunctionTool, CustomTool, ResponseFunction, ResponseCustomTool),
        (
            Ignored("cache_control copilot_cache_control", _CACHE),
            Ignored("strict", _STRICT),
            Ignored("defer_loading eager_input_streaming", _AT_ONCE),
            Ignored("input_examples output_schema", "chat templates have no place for it"),
            NotServed("allowed_callers", "only the model calls tools; add 'direct'", (None, ["direct"])),
            NotServed("async", "a call is answered before the model goes on", (None, False)),
        ),
    ),
    ((CustomTool, ResponseFunction, ResponseCustomTool), (Ignored("defer_loading", _AT_ONCE, bool),)),
    (
        (CustomTool,),
        (
            Ignored("cache_control", _CACHE, _Object),
            Ignored("eager_input_streaming", "what the model writes is streamed at once", bool),
            Ignored("input_examples", "chat templates have no place for it", list[_Object]),
        ),
    ),
    ((ResponseFunction,), (Ignored("output_schema", "chat templates have no place for it", _Object),)),
    (
        (Tool,),
        (
            Renamed("name", "function.name"),
            Renamed("description", "function.description"),
            Renamed("parameters input_schema", "function.parameters"),
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
    (
        (JsonSchemaFormat,),
        (Ignored("description", "the model does not read it", str), Ignored("strict", _STRICT, bool)),
    ),
    (
        (StreamOptions, ResponsesStreamOptions),
        (Ignored("include_obfuscation", "streams are not obfuscated", bool),),
    ),
    ((TextConfig,), (Ignored("verbosity", "models have no such setting", Literal["low", "medium", "high"]),)),
    (
        (ReasoningConfig,),
        (
            Ignored("summary", _AS_THEY_ARE, Literal["auto", "concise", "detailed", "none"]),
            Ignored("generate_summary", _AS_THEY_ARE, Literal["auto", "concise", "detailed"]),
            Ignored("context", _AS_THEY_ARE, Literal["auto", "current_turn", "all_turns"]),
            NotServed("mode", "there is one mode; effort sets the thoughts", (None, "standard")),
        ),
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
            Ignored("id status", _HISTORY, str),
        ),
    ),
    ((MessageItem,), (Ignored("phase", _HISTORY, str),)),
    ((ReasoningItem,), (Ignored("encrypted_content", "it is not read", str),)),
    ((CallItem,), (Ignored("parsed_arguments", _HISTORY),)),
)
_BODIES = (CommonRequest, MessagesInput, ResponsesRequest)
_S = TypeVar("_S", bound=Struct)


@cache
def rules_of(kind: type[Struct]) -> dict[str, Rule]:
    """Return the rules for the fields of an object of this type, by their names. A rule of a later group goes before
    that of an earlier one."""
    rules: dict[str, Rule] = {}
    for kinds, group in _TABLE:
        if issubclass(kind, kinds):
            for rule in group:
                rules.update(dict.fromkeys(rule.names.split(), rule))
    return rules


def sent_type(kind: type[_S]) -> type[_S]:
    """Return the type as which objects of `kind` are decoded. It has also the fields of the table without effect. The
    type of a body has also the fields that are not served, which `check_served` refuses."""
    return _sent_type(kind)


def decoder_of(kind: type[_S]) -> msgspec.json.Decoder[_S]:
    """Return the decoder of what clients send as an object of a type."""
    return _decoder_of(kind)


@cache
def _decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_sent_type(kind))


@cache
def _sent_type(kind: Any) -> Any:
    fields: list[tuple[str, Any, Any]] = []
    for field in structs.fields(kind):
        sent = _sent(field.type)
        if sent != field.type:
            fields.append((field.name, sent, _default_of(field)))
    known = {*(field.encode_name for field in structs.fields(kind)), kind.__struct_config__.tag_field}
    others = {name: rule for name, rule in rules_of(kind).items() if name not in known and name.isidentifier()}
    fields += [(name, rule.kind | None, None) for name, rule in others.items() if isinstance(rule, Ignored)]
    if issubclass(kind, _BODIES):
        fields += [(name, rule.kind | None, None) for name, rule in others.items() if isinstance(rule, NotServed)]
    if not fields:
        return kind
    namespace = {"__doc__": kind.__doc__}
    return defstruct(kind.__name__, fields, bases=(kind,), namespace=namespace, module=kind.__module__, kw_only=True)


def _sent(hint: Any) -> Any:
    """Return a field's type, with the structs in it as they are decoded."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return _sent_type(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(_sent(args[0]), *args[1:])]
    if origin in (Union, UnionType):
        return cast(Any, Union)[tuple(map(_sent, args))]
    if origin is list:
        return GenericAlias(list, (_sent(args[0]),))
    return cast(Any, hint)


def _default_of(field: structs.FieldInfo) -> Any:
    if field.default_factory is not NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.field() if field.default is NODEFAULT else field.default


@cache
def _refusals_of(kind: type[Struct]) -> dict[str, NotServed]:
    """Return the rules of the fields that are not served, which are the last fields of a body's type."""
    known = kind.__struct_fields__
    rules = {name: rule for name, rule in rules_of(kind).items() if name in known and isinstance(rule, NotServed)}
    assert known[len(known) - len(rules) :] == tuple(rules), f"{kind.__name__} declares fields that are not served"
    return rules


def check_served(body: Struct) -> None:
    """Raise RequestError for a field that asks for something that Baton does not serve."""
    rules = _refusals_of(type(body))
    if not rules:
        return
    values = structs.astuple(body)[-len(rules) :]
    if values.count(None) < len(values):  # this is quick, and true of few bodies
        for name, value in zip(rules, values, strict=True):
            check_value(rules[name], value, name)


def check_value(rule: NotServed, value: Any, path: str) -> None:
    """Raise RequestError if the value of a field, which a path leads to, asks for what is not served."""
    if value not in rule.accepted:
        raise rule.error(f"{path}: {rule.words}", param=path.partition(".")[0].partition("[")[0])


@contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Let refusals in the block name the client's field. `names`: paths of fields as the block knows them, and as the
    client does. `[]` in both stands for any index."""
    try:
        yield
    except RequestError as error:
        words = str(error)
        for name, shown in names.items():
            pattern = r"\A" + re.escape(name).replace(r"\[\]", r"(\[\d+\])") + r"(?=[:.\[])"
            changed, num_found = re.subn(pattern, shown.replace("[]", r"\1"), words)
            if num_found:
                raise RequestError(changed, param=re.split(r"[.\[]", shown)[0]) from None
        raise
