"""The application as a whole: paths and methods, errors, headers of every answer, and the log of refusals."""

from __future__ import annotations

import http.client
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from baton.router.http.server.app import MOST_LINES
from baton.router.http.server.routes import ROUTES

from ...conftest import System
from ...dispatching.test_runner import wait_until

OK = {"model": "fake", "prompt": "hello", "max_tokens": 100}


def test_the_router_imports_nothing_heavy() -> None:
    code = "import baton.router.main, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_internal_errors_are_not_shown_to_clients(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(2, "No such file", "/srv/secret/place")

    monkeypatch.setattr(system.router.router.api, "group_of", fail)
    status, body, _ = system.complete()
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert body["error"]["message"] == "internal error; the router's log has the details"
    assert "/srv/secret/place" in caplog.text


def test_unknown_routes_methods_and_models_are_refused(system: System) -> None:
    assert system.router.request("GET", "/nowhere")[0] == 404
    status, body, headers = system.router.request("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert body["error"]["type"] == "invalid_request_error"
    status, body, _ = system.router.request("POST", "/v1/completions", {**OK, "model": "other"})
    assert (status, body["error"]["param"]) == (404, "model")
    assert "fake" in body["error"]["message"]


def test_a_path_that_is_not_served_is_answered_with_those_that_are(system: System) -> None:
    _, listed, _ = system.router.request("GET", "/v1")
    assert {"POST /v1/chat/completions", "GET /v1/models/{model}", "GET /v1"} < set(listed["routes"])
    for method, path in (("GET", "/nowhere"), ("POST", "/v1/chat"), ("GET", "/v1/"), ("OPTIONS", "/admin/nothing")):
        status, body, _ = system.router.request(method, path)
        assert (status, body["error"]["code"]) == (404, "not_found"), path
        message = body["error"]["message"]
        assert message == f"there is no route {path}; the routes are: {', '.join(listed['routes'])}"
        assert "/debug" not in message
        assert "/admin/flush" not in message


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "embeddings are not served; the routes are: POST /v1/completions, "),
        ("/v1/audio/transcriptions", "audio is not served; "),
        ("/v1/images/generations", "images are not served; "),
        ("/v1/embeddings_of_mine", "there is no route /v1/embeddings_of_mine; "),
    ],
)
def test_routes_of_openai_that_are_not_served_are_refused_as_such(system: System, path: str, words: str) -> None:
    status, body, headers = system.router.request("POST", path, {"model": "fake", "input": "x"})
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")
    assert body["error"]["message"].startswith(words)
    assert "retry-after" not in headers


def test_bytes_that_are_not_http_are_refused(system: System) -> None:
    with socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"\x16\x03\x01\x00\xff not http\r\n\r\n")
        assert b"400" in connection.recv(1000)
    assert system.complete()[0] == 200


def test_head_is_answered_like_get(system: System) -> None:
    def status_and_body(method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(system.router.url.removeprefix("http://"))
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    got = [route.path for route in ROUTES if route.method == "GET" and "{" not in route.path and route.chunk is None]
    for path in ("/nothing", "/v1/completions", "/live?once=true", *got):
        assert status_and_body("HEAD", path) == (status_and_body("GET", path)[0], b""), path


def test_every_answer_carries_its_request_id(system: System) -> None:
    _, body, headers = system.complete()
    assert headers["x-request-id"] == body["id"]
    request = system.router.request
    _, _, headers = request("POST", "/v1/completions", OK, headers={"x-request-id": "mine-7"})
    assert headers["x-request-id"] == "mine-7"
    _, _, headers = request("POST", "/v1/completions", {"model": 1}, headers={"x-request-id": "mine-8"})
    assert headers["x-request-id"] == "mine-8"


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
    monkeypatch.setattr("baton.router.http.server.app.MOST_LINES", 100)
    caplog.set_level(logging.INFO, "baton.router.http.server.app")
    system = make_system(router={"api_key": "k", "admin_key": "a"})
    system.cluster.add("prefill", "p")
    authorization = {"Authorization": "Bearer k"}
    model = {"model": "fake"}
    wait_until(lambda: system.router.request("POST", "/detokenize", {**model, "tokens": []}, authorization)[0] == 200)
    system.router.router.api.early.stop()
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
    caplog.set_level(logging.INFO, "baton.router.http.server.app")
    for _ in range(5 * MOST_LINES):
        system.router.request("POST", "/v1/completions", {})
    assert len(caplog.messages) <= 3 * MOST_LINES
    wait_until(lambda: system.router.request("POST", "/v1/completions", {})[0] == 400 and "more were" in caplog.text)
