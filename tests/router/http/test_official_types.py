"""Every answer has the shape of the official API: its types know each field, none that they require is absent, and none
is null where they allow no null."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from ..conftest import System

OWN = {  # fields beside those of the APIs: vLLM's names, and Baton's
    "max_model_len",
    "prompt_token_ids",
    "reasoning",
    "reasoning_content",
    "speculation",
    "stop_reason",
    "store",  # the API sends it, though the type does not name it
    "token_ids",
}
NULL = {  # fields that may be null; the Python types write Optional also for those that are either given or absent
    "ChatCompletionMessage": {"content", "refusal"},
    "Choice": {"finish_reason", "logprobs"},
    "ChoiceLogprobs": {"refusal"},
    "ChatCompletionChunk": {"usage"},
    "Completion": {"usage"},
    "FunctionTool": {"parameters", "strict"},
    "CompletionChoice": {"finish_reason", "logprobs"},
    "Delta": {"container", "stop_details", "stop_sequence"},
    "Logprobs": {"token_logprobs", "top_logprobs"},  # of a prompt's first token
    "Message": {"container", "diagnostics", "stop_details", "stop_reason", "stop_sequence"},
    "MessageDeltaUsage": {"server_tool_use"},
    "ModelInfo": {"capabilities", "deprecated_at", "line", "retires_at"},
    "Response": {
        "error",
        "incomplete_details",
        "instructions",
        "max_output_tokens",
        "previous_response_id",
        "temperature",
        "top_p",
        "usage",
    },
    "Usage": {"cache_creation", "inference_geo", "server_tool_use", "service_tier", "speed"},
}
ALWAYS = {"Delta", "Message", "ModelInfo", "Usage"}  # of Anthropic: TypeScript's types require these fields


def faults(value: Any, kind: Any, path: str = "") -> Iterator[str]:
    """Yield what is wrong with a value of an official type."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if isinstance(value, dict):
        models = [each for each in map(_plain, kinds) if isinstance(each, type) and issubclass(each, BaseModel)]
        if models:
            model = _model_of(value, models)
            yield from _object_faults(value, model, path) if model else [f"{path}: no type {value.get('type')!r}"]
    elif isinstance(value, list):
        for each in (each for each in kinds if get_origin(each) is list):
            for item in (item for item in value if item is not None):
                yield from faults(item, get_args(each)[0], path)


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _model_of(value: dict[str, Any], models: list[type[BaseModel]]) -> type[BaseModel] | None:
    if len(models) == 1:
        return models[0]
    for model in models:
        field = model.model_fields.get("type")
        if field is not None and value.get("type") in get_args(_plain(field.annotation)):
            return model
    return None


def _object_faults(value: dict[str, Any], model: type[BaseModel], path: str) -> Iterator[str]:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    may_be_null = NULL.get(model.__name__, set())
    required = {name for name, field in fields.items() if field.is_required()}
    if model.__name__ in ALWAYS and model.__module__.startswith("anthropic"):
        required |= may_be_null
    for name in required - value.keys():
        yield f"{path}.{name} is absent"
    for name, item in value.items():
        place = f"{path}.{name}".lstrip(".")
        items = item if isinstance(item, list) else [item]
        if name in fields and None in items and name not in may_be_null:
            yield f"{place} is null"
        elif name in fields:
            yield from faults(item, fields[name].annotation, place)
        elif name not in OWN:
            yield f"{place} is unknown"


def checked(value: Any, kind: Any) -> None:
    kinds = get_args(_plain(kind)) if get_origin(_plain(kind)) in (Union, types.UnionType) else (kind,)
    found = list(faults(value, Union[kinds]))  # noqa: UP007
    assert not found, (found, value)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


HELLO = [{"role": "user", "content": "hello"}]
CASES: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "completion": ("/v1/completions", {"prompt": "hello", "logprobs": 2, "echo": True}, Completion, Completion),
    "chat": (
        "/v1/chat/completions",
        {"messages": HELLO, "logprobs": True, "top_logprobs": 2},
        ChatCompletion,
        ChatCompletionChunk,
    ),
    "messages": ("/v1/messages", {"messages": HELLO}, Message, RawMessageStreamEvent),
    "responses": ("/v1/responses", {"input": "hello"}, Response, ResponseStreamEvent),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_as_the_official_types_say(system: System, name: str) -> None:
    path, fields, whole, event = CASES[name]
    body = {"model": "fake", "max_output_tokens" if name == "responses" else "max_tokens": 50, **fields}
    status, answer, _ = system.router.request("POST", path, body)
    assert status == 200, answer
    checked(answer, whole)
    options = {"stream_options": {"include_usage": True}} if name in ("completion", "chat") else {}
    status, raw, _ = system.router.request("POST", path, {**body, **options, "stream": True})
    assert status == 200, raw
    for each in events_of(raw):
        if each.get("type") != "ping":
            checked(each, event)
