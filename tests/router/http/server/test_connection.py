"""The HTTP server's own log lines: only those about faults of the router have tracebacks. Connections without a
request are closed."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable

import pytest
from aiohttp import ClientConnectionResetError
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web import RequestPayloadError

from baton.router.http.server import connection
from baton.router.http.server.connection import ClientErrorFilter

from ...conftest import System


@pytest.mark.parametrize(
    ("error", "is_shown", "line"),
    [
        (ClientConnectionResetError("Cannot write to closing transport"), False, ""),
        (RequestPayloadError("400, message:\n  Can not decode"), False, "no proper HTTP: Can not decode"),
        (ContentEncodingError("bad gzip"), False, "no proper HTTP: bad gzip"),
        (KeyError("ours"), True, ""),
    ],
)
def test_only_our_own_faults_have_tracebacks(
    error: Exception, is_shown: bool, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    try:
        raise error
    except Exception:
        record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    assert ClientErrorFilter().filter(record) == is_shown
    assert line in caplog.text if line else not caplog.text


@pytest.mark.timing
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: local"])
@pytest.mark.parametrize("has_answer", [False, True])
def test_a_connection_without_a_request_is_closed(
    sent: bytes, has_answer: bool, make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is one whose client sends its header byte by byte."""
    monkeypatch.setattr(connection, "FIRST_REQUEST_S", 60.0 if has_answer else 0.4)
    monkeypatch.setattr("baton.router.main.KEEP_ALIVE_S", 0.4)
    host, port = make_system().router.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as client:
        if has_answer:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 ")
        begun = time.monotonic()
        for index in range(len(sent)):
            client.sendall(sent[index : index + 1])
        assert client.recv(1 << 16) == b""
        assert 0.2 < time.monotonic() - begun < 10
