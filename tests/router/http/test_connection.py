"""The HTTP server's own log lines: only those about faults of the router have tracebacks."""

from __future__ import annotations

import logging
import sys

import pytest
from aiohttp import ClientConnectionResetError
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web import RequestPayloadError

from baton.router.http.connection import ClientErrorFilter


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
