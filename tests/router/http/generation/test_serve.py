"""Requests that have ended leave nothing behind."""

from __future__ import annotations

import gc
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.router.requests.request import Request

from ...conftest import System
from ...test_runner import wait_until


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "n": 2}, {"logprobs": 2, "echo": True}])
def test_a_finished_request_is_freed_without_a_collection(system: System, fields: dict[str, Any]) -> None:
    """Full collections are rare, and thousands of prompts would wait for one."""
    with no_collections() as new_requests:
        assert system.complete(**fields)[0] == 200
        wait_until(lambda: not new_requests())


def test_a_request_whose_client_left_is_freed_without_a_collection(system: System) -> None:
    system.behaviour.hold = threading.Event()
    address = urllib.parse.urlsplit(system.router.url)
    body = b'{"model": "fake", "prompt": "hello", "stream": true}'
    with no_collections() as new_requests:
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            wait_until(new_requests)
        wait_until(lambda: not new_requests())
    system.behaviour.hold.set()


@contextmanager
def no_collections() -> Iterator[Callable[[], list[Request]]]:
    """Stop collections of garbage. Yield a function that returns the requests in memory that were not there before."""
    gc.collect()
    gc.freeze()  # the function does not see what is there, of which there is much
    gc.disable()
    try:
        yield _requests
    finally:
        gc.enable()


def _requests() -> list[Request]:
    """Return the requests of clients. `isinstance` would ask objects of libraries for their class, and some warn."""
    return [each for each in gc.get_objects() if type(each) is Request and not each.is_canary]
