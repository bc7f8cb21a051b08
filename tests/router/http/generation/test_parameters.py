"""Fields of request bodies: which values are refused with which words, and which values reach the nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.request import unpack_ids
from baton.router.http.server import openapi
from baton.router.http.server.routes import ROUTES

from ...conftest import System
from ...dispatching.test_runner import own

BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("given", [None, 0, 5, 15])
def test_both_nodes_get_the_drafts_that_the_request_asks_for(system: System, path: str, given: int | None) -> None:
    body = {"model": "fake", "max_tokens": 100, **BODIES[path]}
    for fields in ({"draft_steps": given}, {} if given is None else {"draft_steps": given}):
        assert system.router.request("POST", path, {**body, **fields})[0] == 200
    asked = [*own(system.cluster.by_name("p0"), m.Prefill), *own(system.cluster.by_name("d0"), m.Reserve)]
    assert [message.request.params.draft_steps for message in asked] == [given] * 4


def test_drafts_out_of_range_are_refused_with_their_bound(system: System) -> None:
    for path, fields in BODIES.items():
        status, body, _ = system.router.request("POST", path, {"model": "fake", **fields, "draft_steps": 16})
        assert (status, body["error"]["param"]) == (400, "draft_steps")
        assert body["error"]["message"] == "draft_steps: Expected `int` <= 15"


def test_the_openapi_document_declares_the_draft_fields() -> None:
    schemas = openapi.document(ROUTES)["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        field = schemas[name]["properties"]["draft_steps"]
        assert {"type": "integer", "minimum": 0, "maximum": 15} in field["anyOf"]
        assert "not speculated" in field["description"]


OK = {"model": "fake", "prompt": "hello", "max_tokens": 100}


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


BAD_FIELDS: list[tuple[dict[str, Any], str | None]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 100000}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": "2", "n": 2}, "best_of"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [420]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["ok", ""]}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": [3] * 512}, "prompt"),
    ({"prompt": "word " * 2000}, "prompt"),
    ({"prompt": ["x"] * 300}, "prompt"),
    ({"stop": 5}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [420]}, "stop_token_ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"420": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 2.5}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": "8"}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 8, "prompt": "word " * 300, "max_tokens": 600}, "max_tokens"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [7]}, "bad_words"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"prompt_logprobs": 5}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"detokenize": False}, "detokenize"),
    ({"detokenize": 1}, "detokenize"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": "5"}, "min_tokens"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"min_tokens": 101}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include": True}, "stream": True}, "stream_options"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"draft_steps": -1}, "draft_steps"),
    ({"draft_steps": 16}, "draft_steps"),
    ({"draft_steps": 2.5}, "draft_steps"),
    ({"draft_steps": "5"}, "draft_steps"),
    ({"draft_steps": True}, "draft_steps"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"prompt": "\ud800"}, "prompt"),
]


def test_wrong_fields_are_refused_by_name(system: System) -> None:
    for changes, param in BAD_FIELDS:
        status, body, _ = system.router.request("POST", "/v1/completions", {**OK, **changes})
        error = body["error"]
        assert (status, error["param"]) == (400, param), (changes, body)
        assert error["type"] == "invalid_request_error", changes
        assert error["message"], changes
        if param is not None:
            assert param in error["message"], (changes, error)
    assert system.complete()[0] == 200


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 2**62, -1, 7])
def test_any_seed_of_64_bits_is_served(system: System, seed: int) -> None:
    """Seeds below 2^62 reach the nodes as they are; so their texts stay what they were."""
    for path, body in BODIES.items():
        assert system.router.request("POST", path, {"model": "fake", "max_tokens": 100, **body, "seed": seed})[0] == 200
    asked = own(system.cluster.by_name("p0"), m.Prefill)
    assert {message.request.params.seed for message in asked} == {seed % 2**62}


def test_top_logprobs_of_zero_ask_for_nothing(system: System) -> None:
    for fields in ({"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}):
        status, body, _ = system.router.request("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 100, **fields})
        assert (status, body["choices"][0]["logprobs"]) == (200, None)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "emperor", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "chat_template_kwargs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"detokenize": False}, "detokenize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"prompt": "x"}, "prompt"),
        ({"draft_steps": 16}, "draft_steps"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": 3}}, "chat_template_kwargs"),
    ],
)
def test_wrong_fields_of_a_chat_are_refused_by_name(system: System, changes: dict[str, Any], param: str) -> None:
    status, body, _ = system.router.request("POST", "/v1/chat/completions", {**CHAT, **changes})
    assert (status, body["error"]["param"]) == (400, param), body


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"stop": None, "temperature": None, "n": None, "seed": None, "logit_bias": None, "stream_options": None},
        {"chat_template_kwargs": {"self": 1, "two words": 2, "bos_token": "B", "documents": [{"text": "t"}]}},
        {"bad_words": [], "prompt_logprobs": None, "detokenize": True, "truncate_prompt_tokens": None},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"prompt_cache_key": "s", "prompt_cache_options": {"ttl": "24h"}, "safety_identifier": "u"},
    ],
)
def test_harmless_fields_of_a_chat_are_ignored(system: System, harmless: dict[str, Any]) -> None:
    assert system.router.request("POST", "/v1/chat/completions", {**CHAT, **harmless})[0] == 200


def test_a_refused_field_of_vllm_is_refused_with_a_reason(system: System) -> None:
    for path, fields in BODIES.items():
        for name, value, words in (
            ("bad_words", ["x"], "logit_bias"),
            ("prompt_logprobs", 1, "echo with logprobs on /v1/completions"),
            ("detokenize", False, "return_token_ids"),
        ):
            status, body, _ = system.router.request("POST", path, {"model": "fake", **fields, name: value})
            assert (status, body["error"]["param"]) == (400, name)
            assert words in body["error"]["message"]


def test_nodes_get_the_end_of_a_truncated_prompt(system: System) -> None:
    ids = system.tokenizer.inner.encode("one two three").ids
    for path, fields in (
        ("/v1/completions", {"prompt": "one two three"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two three"}]}),
    ):
        body = {"model": "fake", "max_tokens": 100, "truncate_prompt_tokens": 3, "return_token_ids": True, **fields}
        status, answer, _ = system.router.request("POST", path, body)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 3), answer
    first, second = (unpack_ids(each.request.prompt_ids) for each in own(system.cluster.by_name("p0"), m.Prefill))
    assert first == ids[-3:]
    assert second == system.tokenizer.inner.encode("<|im_start|>assistant\n").ids[-3:]
    _, answer, _ = system.complete(prompt="one two three", truncate_prompt_tokens=3, echo=True)
    assert answer["choices"][0]["text"] == system.tokenizer.decode(ids[-3:]) + system.text
    _, answer, _ = system.complete(prompt="one two three", truncate_prompt_tokens=99, echo=True)
    assert answer["choices"][0]["text"] == "one two three" + system.text


def test_as_many_answers_as_the_best_are_of_are_served(system: System) -> None:
    for fields in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": None, "n": 2}, {"suffix": ""}):
        status, body, _ = system.complete(**fields)
        assert (status, len(body["choices"])) == (200, fields.get("n", 1)), body


def test_a_chat_takes_both_names_of_its_longest_answer(system: System) -> None:
    for fields in ({"max_completion_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 50}, {"max_tokens": 2}):
        status, body, _ = system.router.request("POST", "/v1/chat/completions", {**CHAT, **fields})
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length"), body
        assert body["usage"]["completion_tokens"] == 2
    for wrong in (-1, 1.5, "2", True, [2]):
        fields = {"max_completion_tokens": wrong}
        status, body, _ = system.router.request("POST", "/v1/chat/completions", {**CHAT, **fields})
        assert (status, body["error"]["param"]) == (400, "max_completion_tokens"), body


def test_timeout_s_is_checked_and_ends_the_request(make_system: Callable[..., System]) -> None:
    system = make_system(router={"request_timeout_s": 5.0}).up()
    system.behaviour.hold = threading.Event()
    for bad in (0, -1, 5.1, "soon", float("nan")):
        status, body, _ = system.complete(timeout_s=bad)
        assert (status, body["error"]["param"]) == (400, "timeout_s"), body
    assert "limit of 5 s" in system.complete(timeout_s=6)[1]["error"]["message"]
    status, body, headers = system.complete(timeout_s=0.3)
    assert (status, body["error"]["type"]) == (504, "timeout_error")
    assert "0.3 s" in body["error"]["message"]
    assert headers["x-should-retry"] == "false"
    system.router.wait_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_priorities_out_of_range_are_refused(system: System, path: str) -> None:
    given = {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    for bad in (101, -101, 1.5, "high", True):
        status, body, _ = system.router.request("POST", path, {"model": "fake", **given, "priority": bad})
        assert (status, body["error"]["param"]) == (400, "priority"), body
    for good in (100, -100, 0, None):
        status, _, _ = system.router.request(
            "POST", path, {"model": "fake", "max_tokens": 1, **given, "priority": good}
        )
        assert status == 200
