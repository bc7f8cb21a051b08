"""Errors as HTTP answers: statuses, bodies and headers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton.metadata.errors import BatonError, OutOfPages, Overloaded, RequestError, Unavailable
from baton.router.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    Foreign,
    NodeFault,
    NoNode,
    NotFound,
    RequestCancelled,
    Unauthorized,
)
from baton.router.http.generation.types import CompletionRequest
from baton.router.http.server.errors import (
    HttpRefusal,
    all_statuses,
    body_of,
    from_malformed,
    from_validation,
    response_of,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (RequestError("no", param="n"), 400, "invalid_request_error", None, {}),
        (Unauthorized("no"), 401, "authentication_error", "invalid_api_key", {"WWW-Authenticate": "Bearer"}),
        (Forbidden("no"), 403, "permission_error", "admin_key_required", {}),
        (Foreign("no"), 403, "permission_error", "foreign", {}),
        (NotFound("no"), 404, "invalid_request_error", "not_found", {}),
        (Conflict("no"), 409, "invalid_request_error", "http_error", {}),
        (HttpRefusal(415, "no", {"Accept-Encoding": "gzip"}), 415, "invalid_request_error", "http_error", {}),
        (Overloaded("no", retry_after_s=1.5), 429, "rate_limit_error", "overloaded", {"Retry-After": "2"}),
        (Overloaded("no", retry_after_s=0.5), 429, "rate_limit_error", "overloaded", {"retry-after-ms": "500"}),
        (RequestCancelled("no"), 499, "invalid_request_error", "cancelled", {}),
        (Unavailable("no"), 503, "server_error", "unavailable", {"Retry-After": "1"}),
        (NoNode("no"), 503, "server_error", "unavailable", {"Retry-After": "1"}),
        (OutOfPages("no"), 503, "server_error", "out_of_pages", {}),
        (DeadlineExceeded("no"), 504, "timeout_error", "timeout", {"x-should-retry": "false"}),
        (NodeFault("no", Unavailable.code), 503, "server_error", "unavailable", {"Retry-After": "1"}),
        (NodeFault("no", RequestError.code), 400, "invalid_request_error", None, {}),
        (NodeFault("no", "what the node made up"), 500, "server_error", "node_failed", {}),
        (BatonError("no"), 500, "server_error", "internal_error", {}),
    ],
)
def test_every_error_has_one_answer(
    error: BatonError, status: int, kind: str, code: str | None, headers: dict[str, str]
) -> None:
    response = response_of(error)
    assert isinstance(response.body, bytes)
    detail = json.loads(response.body)["error"]
    assert (response.status, detail["type"], detail["code"]) == (status, kind, code)
    assert headers.items() <= response.headers.items()
    assert isinstance(error, HttpRefusal) or status in all_statuses()


def test_insides_are_hidden_from_clients() -> None:
    assert "secret" not in body_of(BatonError("secret")).error.message
    assert "secret" not in body_of(NodeFault("secret", "code")).error.message
    assert body_of(NodeFault("secret", "code", "shown")).error.message == "shown"
    assert body_of(NoNode("shown", "secret")).error.message == "shown"
    assert body_of(NoNode("shown", "secret"), may_operate=True).error.message == "secret"


def test_a_message_that_is_not_text_can_be_sent() -> None:
    assert body_of(RequestError("\udcff")).error.message == "\\udcff"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "x"}, "model", "missing required field"),
        ({"model": "m", "prompt": "x", "wrong": 1}, "wrong", "unknown field"),
        ({"model": "m", "prompt": "x", "n": "1"}, "n", "Expected `int"),
        ({"model": "m", "prompt": "x", "stream_options": {"y": 1}}, "stream_options", "unknown field"),
        ({"model": "m", "prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "Expected `int`"),
    ],
)
def test_a_validation_error_names_the_field(body: Any, param: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(json.dumps(body), type=CompletionRequest)
    error = from_validation(caught.value)
    assert error.param == param
    assert words in str(error)
    assert str(error).startswith(param)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (rb'{"model": "demo", "prompt": "cut \ud83d"}', r"prompt: \ud83d is half of a surrogate pair; send the whole"),
        (rb'{"messages": [{"content": "\ude00 \ud83d\ude00"}]}', r"messages: \ude00 is half of a surrogate pair"),
        (rb'{"a\ud83d": 1}', r"a\ud83d: \ud83d is half of a surrogate pair"),
        (rb'{"\ud83d": NaN}', r"\ud83d: "),
    ],
)
def test_half_a_surrogate_pair_is_named(body: bytes, words: str) -> None:
    """Clients in JavaScript send it if they cut a text inside an emoji."""
    error = from_malformed(body, ValueError("Input data was truncated"))
    assert str(error).startswith(words)
    assert msgspec.json.decode(msgspec.json.encode(body_of(error)))["error"]["param"] == words.partition(":")[0]


def test_a_body_with_nan_names_the_field() -> None:
    error = from_malformed(b'{"a": 1, "b": {"c": [NaN]}}', ValueError("x"))
    assert (error.param, str(error)) == ("b", "b: NaN and Infinity are no JSON numbers")
    deep = b'{"a": ' + b"[" * 500 + b"-Infinity" + b"]" * 500 + b"}"
    assert str(from_malformed(deep, ValueError("x"))) == "a: NaN and Infinity are no JSON numbers"
    assert str(from_malformed(b"{", ValueError("cut off"))) == "the body is not valid JSON: cut off"
    assert "UTF-8" in str(from_malformed(b"", UnicodeDecodeError("utf-8", b"", 0, 1, "x")))
    assert "nested" in str(from_malformed(b"", RecursionError()))
