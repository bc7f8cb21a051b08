"""Refused requests have one line in the log each, without anything that the client wrote in its body."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from baton.router.http.server.refusal_log import MOST_LINES

from ...conftest import System
from ...test_runner import wait_until

SECRET = "hunter2"
CASES: list[tuple[str, str, Any, dict[str, str], str]] = [
    (
        "POST",
        "/v1/chat/completions",
        {"model": SECRET, "messages": SECRET},
        {},
        "of an unknown caller: 401 Unauthorized",
    ),
    ("GET", "/debug/nodes", None, {"Authorization": "Bearer k"}, "of an unknown caller: 403 Forbidden"),
    ("POST", "/v1/completions", {"model": "fake", SECRET: 1}, {}, "default: 400 RequestError"),
    ("POST", "/v1/completions", {"model": "fake", "prompt": [SECRET, 3]}, {}, "400 RequestError at prompt"),
    ("POST", "/v1/messages", {"model": "fake", "max_tokens": 1, "messages": [{"role": SECRET}]}, {}, "at messages"),
    ("POST", "/v1/completions", {"model": SECRET, "prompt": SECRET}, {}, "404 NotFound at model"),
    ("POST", f"/{SECRET}", {}, {}, "POST an unknown path of default: 404 NotFound"),
    ("DELETE", f"/v1/requests/{SECRET}", None, {}, "DELETE /v1/requests/{id} of default: 404 NotFound"),
    ("PUT", "/v1/completions", {}, {}, "405 HttpRefusal"),
]


def test_each_refusal_is_one_line_without_the_text(
    make_system: Callable[..., System], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.http.server.refusal_log.MOST_LINES", 100)
    caplog.set_level(logging.INFO, "baton.router.http.server.refusal_log")
    system = make_system(router={"api_key": "k", "admin_key": "a"})
    system.cluster.add("prefill", "p")
    authorization = {"Authorization": "Bearer k"}
    model = {"model": "fake"}
    wait_until(lambda: system.router.request("POST", "/detokenize", {**model, "tokens": []}, authorization)[0] == 200)
    for method, path, body, headers, words in CASES:
        caplog.clear()
        headers = {} if "401" in words else headers or authorization
        status, _, _ = system.router.request(method, path, body, headers)
        (line,) = caplog.messages
        assert words in line and str(status) in line, line
        assert SECRET not in line
    caplog.clear()
    system.router.request("GET", "/v1/models", None, authorization)
    assert not caplog.messages


def test_many_refusals_do_not_fill_the_disk(system: System, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.router.http.server.refusal_log")
    for _ in range(5 * MOST_LINES):
        system.router.request("POST", "/v1/completions", {})
    assert len(caplog.messages) <= 3 * MOST_LINES
    wait_until(lambda: system.router.request("POST", "/v1/completions", {})[0] == 400 and "more were" in caplog.text)
