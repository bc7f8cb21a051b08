"""The application as a whole: paths and methods, errors, and headers of every answer."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys

import pytest

from ..conftest import System

OK = {"model": "fake", "prompt": "hello", "max_tokens": 100}


def test_the_router_imports_nothing_heavy() -> None:
    code = "import baton.router.main, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_internal_errors_are_not_shown_to_clients(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(model: str | None) -> None:
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


def test_bytes_that_are_not_http_are_refused(system: System) -> None:
    with socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"\x16\x03\x01\x00\xff not http\r\n\r\n")
        assert b"400" in connection.recv(1000)
    assert system.complete()[0] == 200


def test_head_is_answered_like_get(system: System) -> None:
    for path, status in (("/health", 200), ("/v1/completions", 405)):
        connection = http.client.HTTPConnection(system.router.url.removeprefix("http://"))
        connection.request("HEAD", path)
        assert connection.getresponse().status == status
        connection.close()


def test_every_answer_carries_its_request_id(system: System) -> None:
    _, body, headers = system.complete()
    assert headers["x-request-id"] == body["id"]
    request = system.router.request
    _, _, headers = request("POST", "/v1/completions", OK, headers={"x-request-id": "mine-7"})
    assert headers["x-request-id"] == "mine-7"
    _, _, headers = request("POST", "/v1/completions", {"model": 1}, headers={"x-request-id": "mine-8"})
    assert headers["x-request-id"] == "mine-8"
