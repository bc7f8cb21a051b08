"""Bodies that are malformed, too large, late, compressed or broken: the right status, and the system still serves."""

from __future__ import annotations

import gzip
import json
import random
import select
import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import http_parser

from baton.metadata.errors import Overloaded, RequestError
from baton.router.http.bodies import bodies
from baton.router.http.bodies.bodies import (
    MAX_IDS,
    MAX_MEMBERS,
    MAX_PLAIN,
    MAX_VALUES,
    SMALL_BODY,
    BodyRoom,
    BodySize,
    ReceivedBody,
    decoded,
    exact_size,
    most_plain,
    quick_size,
)
from baton.router.http.generation.types import ChatRequest, CompletionRequest, DetokenizeRequest
from baton.router.http.server.errors import HttpRefusal

from ...conftest import System, check_is_declared
from ...dispatching.test_runner import wait_until
from ..server.test_cross_origin import Answer, send

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
    with socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1])), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{")
        assert b" 413 " in connection.recv(1000)


def opened_with(system: System, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1])), timeout=60)
    connection.sendall(data)
    return connection


def send_in_part(system: System, length: int) -> socket.socket:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n{"
    return opened_with(system, head % length)


def _has_answer(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0.05)[0])


def expecting(system: System, headers: bytes) -> socket.socket:
    """Return a connection that has sent the headers of a completion and waits before it sends the body."""
    connection = socket.create_connection(("127.0.0.1", int(system.router.url.rsplit(":", 1)[1])), timeout=60)
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
    held = [opened_with(system, head + b"{" * ((1 << 18) - 10)) for _ in range(2 * bodies.MAX_BODIES)]
    wait_until(lambda: any(map(_has_answer, held)))
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
    """The router does not wait for a body that is only declared as compressed."""
    headers = {"Content-Encoding": encoding}
    status, body, _ = system.router.request("POST", "/detokenize", {"tokens": [422, 20, 113, 258, 178, 71]}, headers)
    assert status == (400 if encoding == "gzip" else 415), body


BODY = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 100}).encode()
ZIPPED = gzip.compress(BODY)
LIMIT = 100_000


def post(system: System, encoding: str | None, body: bytes, *, is_chunked: bool = False) -> Answer:
    headers = [] if encoding is None else [f"Content-Encoding: {encoding}"]
    if is_chunked:
        parts = [body[start : start + 7] for start in range(0, min(len(body), 700), 7)] + [body[700:]]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"
        headers.append("Transfer-Encoding: chunked")
    answer = send(system.router, "POST", "/v1/completions", *headers, body=body, has_length=not is_chunked)
    check_is_declared("POST", "/v1/completions", answer.status)
    return answer


@pytest.fixture
def small(make_system: Callable[..., System]) -> System:
    return make_system(router={"max_body_bytes": LIMIT}).up()


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("encoding", [None, "", "identity", "gzip", "GZIP", "x-gzip"])
def test_plain_and_gzip_bodies_are_served(system: System, encoding: str | None, is_chunked: bool) -> None:
    body = ZIPPED if "gzip" in (encoding or "").lower() else BODY
    answer = post(system, encoding, body, is_chunked=is_chunked)
    assert answer.status == 200, answer
    assert json.loads(answer.body)["choices"][0]["text"] == system.text


def test_installed_libraries_do_not_change_the_encodings(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HAS_BROTLI", "HAS_ZSTD"):
        monkeypatch.setattr(http_parser, name, not getattr(http_parser, name))
    test_other_encodings_are_all_refused_in_the_same_way(system)


def test_other_encodings_are_all_refused_in_the_same_way(system: System) -> None:
    for encoding in ("br", "zstd", "deflate", "compress", "gzip, gzip", "gzip, br", "nonsense", "gzip;q=1"):
        for is_chunked in (False, True):
            answer = post(system, encoding, ZIPPED, is_chunked=is_chunked)
            words = f"a body with Content-Encoding {encoding!r} is not served; send it with gzip, or as it is"
            assert (answer.status, answer.words) == (415, words)
            assert answer.headers["accept-encoding"] == "gzip"
    assert system.complete()[0] == 200


BROKEN = {
    "no gzip": BODY,
    "nothing": b"",
    "cut": ZIPPED[:-1],
    "cut in the data": ZIPPED[: len(ZIPPED) // 2],
    "cut in the head": ZIPPED[:5],
    "wrong checksum": ZIPPED[:-8] + b"\0\0\0\0" + ZIPPED[-4:],
    "wrong length": ZIPPED[:-4] + b"\1\1\1\1",
    "more behind": ZIPPED + b"more",
    "a cut member behind": ZIPPED + ZIPPED[:9],
    "zlib": zlib.compress(BODY),
}


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_gzip_is_a_bad_request(system: System, name: str, is_chunked: bool) -> None:
    answer = post(system, "gzip", BROKEN[name], is_chunked=is_chunked)
    assert answer.status == 400, answer
    assert "gzip" in answer.words


def test_gzip_members_are_joined_to_one_body() -> None:
    halves = gzip.compress(BODY[:20]) + gzip.compress(BODY[20:])
    assert decoded(halves, "gzip", LIMIT) == BODY
    empty = gzip.compress(b"")
    assert decoded(empty * (MAX_MEMBERS - 1) + ZIPPED, "gzip", LIMIT) == BODY
    with pytest.raises(RequestError, match="members"):
        decoded(empty * MAX_MEMBERS + ZIPPED, "gzip", LIMIT)


def test_the_size_limit_counts_decompressed_bytes() -> None:
    for size, fits in ((LIMIT - 1, True), (LIMIT, True), (LIMIT + 1, False)):
        for data in (gzip.compress(b" " * size), gzip.compress(b" " * 10) + gzip.compress(b" " * (size - 10))):
            if fits:
                assert decoded(data, "gzip", LIMIT) == b" " * size
            else:
                with pytest.raises(HttpRefusal, match="larger than"):
                    decoded(data, "gzip", LIMIT)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_bomb_is_not_inflated(small: System, is_chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    inflate = zlib.decompressobj

    class Counted:
        def __init__(self, *args: Any) -> None:
            self._inner = inflate(*args)

        def decompress(self, data: bytes, max_length: int) -> bytes:
            out = self._inner.decompress(data, max_length)
            made.append(len(out))
            return out

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    monkeypatch.setattr(zlib, "decompressobj", Counted)
    bomb = gzip.compress(b" " * (80 << 20))
    assert len(bomb) < LIMIT
    answer = post(small, "gzip", bomb, is_chunked=is_chunked)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (413, "http_error")
    assert sum(made) <= LIMIT + 1
    assert small.complete()[0] == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_compressed_body_above_the_limit_is_refused(small: System, is_chunked: bool) -> None:
    noise = random.Random(0).randbytes(2 * LIMIT)
    assert post(small, "gzip", gzip.compress(noise), is_chunked=is_chunked).status == 413


def test_bodies_of_operators_may_be_compressed(system: System) -> None:
    body = gzip.compress(b'{"timeout_s": 0}')
    headers = ("Content-Encoding: gzip", "Content-Type: application/json")
    assert send(system.router, "POST", "/admin/nodes/d0/drain", *headers, body=body).status == 200
    assert send(system.router, "POST", "/admin/nodes/d0/undrain", "Content-Encoding: gzip").status == 200


def test_one_caller_may_take_all_and_gives_way_to_others() -> None:
    room, gone = BodyRoom(1000), list[str]()
    first = [ReceivedBody("a", lambda: gone.append("a")) for _ in range(2)]
    for body, size in zip(first, (300, 700), strict=True):
        room.add(body, SMALL_BODY + size)
    small = [ReceivedBody("a", lambda: gone.append("small")) for _ in range(100)]
    for body in small:
        room.add(body, SMALL_BODY)  # never counts
    more = ReceivedBody("a", lambda: gone.append("more"))
    with pytest.raises(Overloaded):
        room.add(more, SMALL_BODY + 1)
    room.remove(more)
    other = ReceivedBody("b", lambda: gone.append("b"))
    room.add(other, SMALL_BODY + 400)
    assert gone == ["a"] and first[1].is_displaced, "the largest of the caller with most"
    with pytest.raises(Overloaded):
        room.add(first[1], 50)  # it came before its reader knew
    room.add(other, 300)
    with pytest.raises(Overloaded):
        room.add(other, 100)  # a holds less now
    for body in (*first, *small, other):
        room.remove(body)
        room.remove(body)
    room.add(ReceivedBody("c", lambda: None), SMALL_BODY + 1000)


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "body",
    [
        {
            "messages": [MESSAGE] * 4096,
            "tools": [{"type": "function", "function": {"name": f"t{i}"}} for i in range(512)],
        },
        {"prompt": '{"a": [1, 2]}, \\' * 400_000},
        {"prompt": "\\" * 7 + '"' * 300_000},
        {"prompt": ["\\", '"', '\\"', '[,{"' * 400_000]},
        {"prompt": [12345] * (1 << 20)},
        {"prompt": "," * 8_000_000},
    ],
    ids=["messages", "code", "quotes", "ends", "ids", "commas"],
)
def test_bodies_that_fit_a_context_are_served(body: dict[str, Any]) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    size = quick_size(data, MAX_IDS) or exact_size(data, MAX_IDS)
    assert size.num_bytes == len(data)
    assert size.num_values <= MAX_VALUES


@pytest.mark.parametrize(
    "value", [[[]] * MAX_VALUES, [{}] * MAX_VALUES, ["\\"] * MAX_VALUES, {str(i): 0 for i in range(MAX_VALUES)}]
)
def test_too_many_values_are_refused_before_decoding(value: Any) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_VALUES} are served"):
        exact_size(json.dumps({"user": "[" * MAX_VALUES, "prompt": value}).encode(), MAX_PLAIN)
    with pytest.raises(RequestError, match=f"at most {MAX_PLAIN} are served"):
        exact_size(json.dumps([1] * (MAX_PLAIN + 2), separators=(",", ":")).encode(), MAX_PLAIN)


def test_a_small_body_is_served_in_the_loop() -> None:
    size = quick_size(json.dumps({"messages": [MESSAGE] * 500}).encode(), MAX_PLAIN)
    assert size is not None and size.is_small
    assert quick_size(b"[" * (MAX_VALUES + 1), MAX_PLAIN) is None
    assert [most_plain(kind) for kind in (CompletionRequest, DetokenizeRequest, ChatRequest)] == [
        MAX_IDS,
        MAX_IDS,
        MAX_PLAIN,
    ]
    assert not BodySize(1 << 20, 3).is_small
