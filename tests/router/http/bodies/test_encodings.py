"""Bodies with a Content-Encoding over raw sockets: gzip is served within the limit of bodies, others are refused."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import http_parser

from baton.metadata.errors import RequestError
from baton.router.http.bodies.encodings import MAX_MEMBERS, decoded
from baton.router.http.server.errors import HttpRefusal

from ...conftest import System, check_is_declared
from ..server.test_cross_origin import Answer, send

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
