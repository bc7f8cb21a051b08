"""Bodies that are malformed, too large, late, compressed or broken: the right status, and the system still serves."""

from __future__ import annotations

import json
import select
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from baton.router.http.bodies import bodies

from ...conftest import System
from ...test_runner import wait_until

OK = {"model": "fake", "prompt": "hello", "max_tokens": 100}


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
def test_malformed_json_is_refused(system: System, raw: bytes) -> None:
    status, body, _ = system.router.request("POST", "/v1/completions", raw)
    assert status == 400, body
    assert body["error"]["type"] == "invalid_request_error"


def test_a_byte_order_mark_is_passed_over_and_other_encodings_are_named(system: System) -> None:
    text = json.dumps(OK)
    assert system.router.request("POST", "/v1/completions", b"\xef\xbb\xbf" + text.encode())[0] == 200
    assert (
        system.router.request("POST", "/v1/completions", b"\xef\xbb\xbf" + text.encode()[:-1] + b', "x": null}')[0]
        == 200
    )
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
        status, body, _ = system.router.request("POST", "/v1/completions", text.encode(encoding))
        assert (status, body["error"]["message"]) == (400, f"the body is in {encoding[:6].upper()}; send it in UTF-8")


def test_a_body_above_the_limit_is_refused(system: System) -> None:
    status, body, _ = system.router.request("POST", "/v1/completions", json.dumps({**OK, "prompt": "x" * 10_000_000}))
    assert (status, body["error"]["code"]) == (413, "http_error"), body
    assert f"larger than {system.router.config.max_body_bytes} bytes; send less" in body["error"]["message"]
    assert system.complete()[0] == 200


def test_a_body_that_is_announced_too_large_is_not_waited_for(system: System) -> None:
    with socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1])), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{")
        assert b" 413 " in connection.recv(1000)


def send(system: System, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1])), timeout=5)
    connection.sendall(data)
    return connection


def send_in_part(system: System, length: int) -> socket.socket:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n{"
    return send(system, head % length)


def _has_answer(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0.05)[0])


def expecting(system: System, headers: bytes) -> socket.socket:
    """Return a connection that has sent the headers of a completion and waits before it sends the body."""
    connection = socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1])), timeout=5)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + headers + b"\r\n")
    return connection


def test_a_body_is_invited_when_it_is_read(system: System) -> None:
    body = json.dumps(OK).encode()
    length = b"Content-Length: %d\r\n" % len(body)
    with expecting(system, b"Host: localhost\r\nExpect: 100-continue\r\n" + length) as connection:
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Host: evil.example\r\nContent-Length: 5\r\n", b"403"),
        (b"Host: localhost\r\nContent-Length: 99999999999\r\n", b"413"),
        (b"Host: localhost\r\nContent-Length: 5\r\nContent-Encoding: br\r\n", b"415"),
    ],
)
def test_a_body_that_is_refused_is_not_invited(system: System, headers: bytes, status: bytes) -> None:
    with expecting(system, headers + b"Expect: 100-continue\r\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("value", [b"200-maybe", b"\xff"])
def test_an_unknown_expectation_is_ignored(system: System, value: bytes) -> None:
    body = json.dumps(OK).encode()
    length = b"Content-Length: %d\r\n" % len(body)
    with expecting(system, b"Host: localhost\r\nExpect: " + value + b"\r\n" + length) as connection:
        connection.sendall(body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_does_not_come_is_not_waited_for(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.2)
    with send_in_part(system, 100) as connection:
        answer = connection.recv(1000)
        if b"\r\n\r\n{" not in answer:
            answer += connection.recv(1000)
    assert b" 408 " in answer
    assert b"did not arrive within 0.2 s" in answer


def test_bodies_that_are_announced_shut_nobody_out(make_system: Any) -> None:
    """Only received bytes count. The room is full when 32 bodies have come, and small bodies still have theirs."""
    system: System = make_system(router={"max_body_bytes": 1 << 18}).up()
    held = [send_in_part(system, 1 << 18) for _ in range(2 * bodies.MAX_BODIES)]
    assert system.complete(user="a" * 200_000)[0] == 200
    for connection in held:
        connection.sendall(b"a" * ((1 << 18) - 10))
    wait_until(lambda: system.complete(user="a" * 200_000)[0] == 429)
    assert system.complete()[0] == 200
    for connection in held:
        connection.close()
    wait_until(lambda: system.complete(user="a" * 200_000)[0] == 200)


def test_tenants_share_the_room_for_bodies(make_system: Any, tmp_path: Path) -> None:
    """A tenant alone may fill all of it, and gives way to another."""
    keys = tmp_path / "keys"
    keys.write_text("first one acme\nsecond two other\n")
    system: System = make_system(router={"max_body_bytes": 1 << 18, "api_keys": str(keys)})
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\nContent-Length: %d\r\n\r\n" % (
        1 << 18
    )
    held = [send(system, head + b"{" * ((1 << 18) - 10)) for _ in range(2 * bodies.MAX_BODIES)]
    refused = [connection for connection in held if _has_answer(connection)]
    assert 0 < len(refused) < len(held) - bodies.MAX_BODIES + 1
    body = {"tokens": [], "model": "a" * 200_000}
    status, answer, _ = system.router.request("POST", "/detokenize", body, {"Authorization": "Bearer two"})
    assert status == 503, answer  # it was read, though all room was taken
    for connection in held:
        connection.close()


@pytest.mark.timing
def test_a_body_that_comes_slowly_is_refused_in_words(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.2)
    begun = time.monotonic()
    with send_in_part(system, 100_000) as connection:
        connection.sendall(b"a" * 1600)
        answer = connection.recv(1000)
        assert b" 408 " in answer and b"must come at 16384 bytes per second" in answer, answer
    assert 0.25 < time.monotonic() - begun < 5


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


@pytest.mark.parametrize("encoding", ["deflate", "gzip", "br", "nonsense"])
def test_compressed_bodies_are_refused_at_once(system: System, encoding: str) -> None:
    """The router does not wait for a body that is only declared as compressed. test_encodings.py has real ones."""
    headers = {"Content-Encoding": encoding}
    status, body, _ = system.router.request("POST", "/detokenize", {"tokens": [422, 20, 113, 258, 178, 71]}, headers)
    assert status == (400 if encoding == "gzip" else 415), body
