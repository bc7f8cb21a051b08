"""Bad input, one by one: the right status, the field named, and the system still serving."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from baton.router.http import app

from ..conftest import System
from ..test_dispatcher import wait_until

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
    ({"seed": "x"}, "seed"),
    ({"seed": 2**70}, "seed"),
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
    ({"prompt": "\ud800"}, None),
]


def test_bad_fields(system: System) -> None:
    for changes, param in BAD_FIELDS:
        status, body, _ = system.router.request("POST", "/v1/completions", {**OK, **changes})
        error = body["error"]
        assert (status, error["param"]) == (400, param), (changes, body)
        assert error["type"] == "invalid_request_error", changes
        assert error["message"], changes
        if param is not None:
            assert param in error["message"], (changes, error)
    assert system.complete()[0] == 200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "emperor", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"prompt": "x"}, "prompt"),
        ({"draft_steps": 16}, "draft_steps"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_bad_chat(system: System, changes: dict[str, Any], param: str) -> None:
    status, body, _ = system.router.request("POST", "/v1/chat/completions", {**CHAT, **changes})
    assert (status, body["error"]["param"]) == (400, param), body


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"stop": None, "temperature": None, "n": None, "seed": None, "logit_bias": None, "stream_options": None},
        {"chat_template_kwargs": {"self": 1, "two words": 2, "tools": 3}},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
    ],
)
def test_harmless_chat_fields(system: System, harmless: dict[str, Any]) -> None:
    assert system.router.request("POST", "/v1/chat/completions", {**CHAT, **harmless})[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "fake", "prompt": "\xff"}',
        b"[" * 100_000,
        b'{"user": ' + b"[" * 100_000,
        b'{"metadata": {"a": ' + b"[" * 100_000,
        b'{"model": "fake", "prompt": "x"} trailing',
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_bad_json(system: System, raw: bytes) -> None:
    status, body, _ = system.router.request("POST", "/v1/completions", raw)
    assert status == 400, body
    assert body["error"]["type"] == "invalid_request_error"


def test_large_body(system: System) -> None:
    status, body, _ = system.router.request("POST", "/v1/completions", json.dumps({**OK, "prompt": "x" * 10_000_000}))
    assert (status, body["error"]["code"]) == (413, "http_error"), body
    assert system.complete()[0] == 200


def test_a_body_that_is_announced_too_large_is_not_waited_for(system: System) -> None:
    with socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1])), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{")
        assert b" 413 " in connection.recv(1000)


def send_in_part(system: System, length: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1])), timeout=5)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n{" % length)
    return connection


def test_a_body_that_does_not_come_is_not_waited_for(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.2)
    with send_in_part(system, 100) as connection:
        answer = connection.recv(1000)
        if b"\r\n\r\n{" not in answer:
            answer += connection.recv(1000)
    assert b" 408 " in answer
    assert b"did not arrive within 0.2 s" in answer


def test_bodies_that_are_received_at_once_are_bounded(make_system: Any) -> None:
    system: System = make_system(router={"max_body_bytes": 1000}).up()
    held = [send_in_part(system, 999) for _ in range(app.MAX_BODIES)]
    wait_until(lambda: system.complete(prompt="a" * 100)[0] == 429)
    for connection in held:
        connection.close()
    wait_until(lambda: system.complete()[0] == 200)


def test_what_goes_wrong_inside_is_not_told(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(model: str | None) -> None:
        raise OSError(2, "No such file", "/srv/secret/place")

    monkeypatch.setattr(system.router.router.api, "group_of", fail)
    status, body, _ = system.complete()
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert body["error"]["message"] == "internal error; the router's log has the details"
    assert "/srv/secret/place" in caplog.text


@pytest.mark.parametrize(("key", "is_told"), [("boss", True), ("client", False)])
def test_why_the_router_is_not_ready_is_for_operators(make_router: Any, key: str, is_told: bool) -> None:
    router = make_router(api_key="client", admin_key="boss")
    status, body, _ = router.request("GET", "/ready", headers={"Authorization": f"Bearer {key}"})
    assert status == 503
    assert ("no node has joined" in body["error"]["message"]) == is_told


def test_routes(system: System) -> None:
    assert system.router.request("GET", "/nowhere")[0] == 404
    status, body, headers = system.router.request("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert body["error"]["type"] == "invalid_request_error"
    status, body, _ = system.router.request("POST", "/v1/completions", {**OK, "model": "other"})
    assert (status, body["error"]["param"]) == (404, "model")
    assert "fake" in body["error"]["message"]


def test_not_even_http(system: System) -> None:
    with socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"\x16\x03\x01\x00\xff not http\r\n\r\n")
        assert b"400" in connection.recv(1000)
    assert system.complete()[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
        b"Content-Length: -5\r\n\r\n",
        b"Content-Length: 100\r\n\r\n{",  # and then leaves
    ],
)
def test_broken_bodies_are_one_line_in_the_log(system: System, caplog: pytest.LogCaptureFixture, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + sent)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1000)
    assert b" 400 " in answer or b" 415 " in answer or answer == b"", answer
    assert system.complete()[0] == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"], caplog.text


def test_head_is_answered_where_get_is(system: System) -> None:
    for path, status in (("/health", 200), ("/v1/completions", 405)):
        connection = http.client.HTTPConnection(system.router.url.removeprefix("http://"))
        connection.request("HEAD", path)
        assert connection.getresponse().status == status
        connection.close()


def test_tokenize_and_detokenize(system: System) -> None:
    ids = system.tokenizer.inner.encode("héllo").ids
    status, body, _ = system.router.request("POST", "/tokenize", {"model": "fake", "prompt": "héllo"})
    assert (status, body["tokens"], body["count"], body["max_model_len"]) == (200, ids, len(ids), 512)
    status, body, _ = system.router.request("POST", "/detokenize", {"tokens": ids})
    assert (status, body["prompt"]) == (200, "héllo")
    status, body, _ = system.router.request("POST", "/detokenize", {"tokens": [9999]})
    assert (status, body["error"]["param"]) == (400, "tokens")
    status, body, _ = system.router.request("POST", "/tokenize", {"messages": CHAT["messages"]})
    assert system.tokenizer.decode(body["tokens"]).startswith("<|im_start|>user")
    assert system.router.request("POST", "/tokenize", {})[0] == 400
    status, body, _ = system.router.request("POST", "/tokenize", {"prompt": "x" * 1_000_000})  # would take seconds
    assert (status, body["error"]["param"]) == (400, "prompt")


def test_api_key(make_system: Any) -> None:
    system: System = make_system(router={"api_key": "sesame"})
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    request = system.router.request
    assert request("GET", "/health")[0] == 200
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/debug/ledger"),
        ("POST", "/admin/flush"),
    ):
        status, body, headers = request(method, path)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer other", "Basic sesame", "sesame", "Bearer sesamé"):
        assert (
            request("GET", "/v1/models", headers={"Authorization": wrong.encode("latin-1").decode("latin-1")})[0] == 401
        )
    assert request("GET", "/v1/models", headers={"Authorization": "Bearer sesame"})[0] == 200


def test_request_id(system: System) -> None:
    _, body, headers = system.complete()
    assert headers["x-request-id"] == body["id"]
    request = system.router.request
    _, _, headers = request("POST", "/v1/completions", OK, headers={"x-request-id": "mine-7"})
    assert headers["x-request-id"] == "mine-7"
    _, _, headers = request("POST", "/v1/completions", {"model": 1}, headers={"x-request-id": "mine-8"})
    assert headers["x-request-id"] == "mine-8"


@pytest.mark.parametrize("encoding", ["deflate", "gzip", "br", "nonsense"])
def test_compressed_bodies_are_refused_at_once(system: System, encoding: str) -> None:
    """A body that only says it is compressed must not be waited for. Those that are: test_encodings.py."""
    headers = {"Content-Encoding": encoding}
    status, body, _ = system.router.request("POST", "/detokenize", {"tokens": [422, 20, 113, 258, 178, 71]}, headers)
    assert status == (400 if encoding == "gzip" else 415), body
