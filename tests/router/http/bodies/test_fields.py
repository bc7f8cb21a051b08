"""The table of fields: what has no effect, what is served under another name, what is refused, and typing errors."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from baton.metadata.errors import BatonError, RequestError
from baton.router.errors import NotFound
from baton.router.http.anthropic.types import MessagesRequest
from baton.router.http.bodies.bodies import decode
from baton.router.http.bodies.fields import Ignored, check_served, decoder_of, renamed, rules_of
from baton.router.http.generation.types import ChatRequest, CompletionRequest
from baton.router.http.responses.types import ResponsesRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
BODIES = (CompletionRequest, ChatRequest, MessagesRequest, ResponsesRequest)


def chat(**fields: Any) -> ChatRequest:
    return decode(json.dumps({**CHAT, **fields}).encode(), ChatRequest)


def served(body: ChatRequest) -> ChatRequest:
    """Return the body without what has no effect."""
    return msgspec.convert(body, ChatRequest, from_attributes=True)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"thinking_budget": 9}, {"thinking_token_budget": 9}),
        ({"stream": True, "usage": {"include": True}}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"nvext": {"top_k": 3, "agent_hints": {}}}, {"top_k": 3}),
        ({"extra_body": {"repeat_penalty": 1.5}}, {"repetition_penalty": 1.5}),
        ({"n_predict": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"separate_reasoning": True, "session_id": "s", "cache_prompt": True, "usage": {"include": True}}, {}),
    ],
)
def test_fields_stand_for_others_or_for_nothing(fields: dict[str, Any], same: dict[str, Any]) -> None:
    assert served(chat(**fields)) == served(chat(**same))


def test_grammars_are_served_under_the_names_of_other_servers() -> None:
    for name, inner in (("guided_regex", "regex"), ("regex", "regex"), ("ebnf", "grammar"), ("grammar", "grammar")):
        given = chat(**{name: "a+"}).structured_outputs
        assert given is not None and getattr(given, inner) == "a+"
    for name in ("guided_json", "json_schema"):  # the schema is kept as it was written
        given = chat(**{name: {"type": "object"}}).structured_outputs
        assert given is not None and bytes(given.json) == b'{"type": "object"}'


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temprature": 1}, "temprature: unknown field; the nearest known field is temperature"),
        ({"separate_reasoning": False}, "separate_reasoning: --reasoning-parser none"),
        ({"mirostat": 2}, "mirostat: this sampler is not served"),
        ({"n_predict": 5, "max_tokens": 6}, "n_predict: excludes max_tokens"),
        ({"nvext": {"use_raw_prompt": True}}, "use_raw_prompt: /v1/completions"),
        ({"nvext": 3}, "nvext: it must be an object"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort: unknown field"),
        ({"chat_template": "{{ x }}"}, "chat_template: the model's own"),
        ({"prompt_mode": "reasoning"}, "prompt_mode: the model's own"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "one that the client runs is given with its schema"),
    ],
)
def test_what_would_change_the_answer_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        chat(**fields)


def test_histories_come_back_with_the_fields_of_other_servers() -> None:
    said = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a", "annotations": []}],
        "id": "m1",
        "type": "message",
        "reasoning_details": [{"type": "reasoning.text", "text": "t"}],
        "extra_content": {},
        "tool_calls": [
            {"id": "c", "type": "function", "extra_content": {}, "function": {"name": "f", "arguments": "{}", "id": 1}}
        ],
    }
    tools = [{"type": "function", "cache_control": {}, "function": {"name": "f", "cache_control": {}}}]
    body = chat(messages=[CHAT["messages"][0], said], tools=tools)
    assert body.messages[1].tool_calls is not None and body.messages[1].tool_calls[0].function.name == "f"
    with pytest.raises(RequestError, match=r"messages\[0\]\.prefix: the field is continue_final_message"):
        chat(messages=[{"role": "assistant", "content": "a", "prefix": True}])
    with pytest.raises(RequestError, match=r"messages\[0\]\.contents: unknown field; .* content"):
        chat(messages=[{"role": "user", "contents": "a"}])


def test_types_declare_what_is_served_and_the_table_tells_the_rest() -> None:
    """Strict decoding takes fields without effect, at any depth; a body is then refused for what is not served."""
    for kind in BODIES:
        for name, rule in rules_of(kind).items():
            assert isinstance(rule, Ignored) or name not in kind.__struct_fields__, (kind, name)
    message = {"role": "assistant", "content": [{"type": "text", "text": "a", "cache_control": {}}], "audio": None}
    raw = json.dumps({**CHAT, "messages": [message], "user": "u", "store": True, "bad_words": ["a"]}).encode()
    body = decoder_of(ChatRequest).decode(raw)
    with pytest.raises(RequestError, match="bad_words: words cannot be banned"):
        check_served(body)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (ChatRequest, {"user": 5}, "user: Expected `str | null`, got `int`"),
        (ChatRequest, {"metadata": []}, "metadata: Expected `object | null`, got `array`"),
        (ChatRequest, {"bad_words": ["a"]}, "bad_words: words cannot be banned"),
        (CompletionRequest, {"suffix": "x"}, "suffix: insertion is not served"),
        (MessagesRequest, {"cache_control": "x"}, "cache_control: Expected `object | null`, got `str`"),
        (ResponsesRequest, {"truncation": "middle"}, "truncation: Invalid enum value 'middle'"),
        (ResponsesRequest, {"include": "x"}, "include: Expected `array | null`, got `str`"),
    ],
)
def test_fields_of_the_table_are_refused_by_name(
    kind: type[msgspec.Struct], fields: dict[str, Any], words: str
) -> None:
    needed = (
        {"model": "m", "max_tokens": 5, **CHAT} if kind is MessagesRequest else {"prompt": "a", "input": "a", **CHAT}
    )
    body = {name: value for name, value in needed.items() if name in kind.__struct_fields__}
    with pytest.raises(RequestError, match=re.escape(words)):
        check_served(decode(json.dumps({**body, **fields}).encode(), kind))


NAMES = {"stop": "stop_sequences", "a.b": "c.d.e", "f[].g.h": "i[].h", "f[].g": "i[]"}


@pytest.mark.parametrize(
    ("words", "shown", "param"),
    [
        ("stop: too many", "stop_sequences: too many", "stop_sequences"),
        ("stop[3]: empty", "stop_sequences[3]: empty", "stop_sequences"),
        ("a.b.x: bad", "c.d.e.x: bad", "c"),
        ("stop_token_ids: bad", "stop_token_ids: bad", "p"),
        ("a: bad", "a: bad", "p"),
        ("f[12].g.h.x: bad", "i[12].h.x: bad", "i"),
        ("f[0].g.name: bad", "i[0].name: bad", "i"),
        ("f[0].gh: bad", "f[0].gh: bad", "p"),
        ("f.g: bad", "f.g: bad", "p"),
    ],
)
def test_a_refusal_names_the_clients_field(words: str, shown: str, param: str) -> None:
    with pytest.raises(RequestError) as caught, renamed(NAMES):
        raise RequestError(words, param="p")
    assert (str(caught.value), caught.value.param) == (shown, param)


@pytest.mark.parametrize("error", [NotFound("model 'x' is not served", param="model"), BatonError("stop: broken")])
def test_other_errors_stay_as_they_are(error: BatonError) -> None:
    with pytest.raises(BatonError) as caught, renamed(NAMES):
        raise error
    assert caught.value is error
