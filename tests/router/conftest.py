"""A real router in a thread, and fake nodes that join it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from baton.router.config import RouterConfig
from baton.router.http.server import openapi
from baton.router.http.server.routes import ROUTES
from baton.router.main import Router
from baton.router.text.tokenizer import TextTokenizer

from .fake_nodes import Behaviour, FakeCluster, Script, make_tokenizer

DECLARED: dict[str, Any] = openapi.document(ROUTES)["paths"]


class RunningRouter:
    """A router in a thread of its own, on free ports."""

    def __init__(self, **settings: Any) -> None:
        settings = {"port": 0, "node_address": "tcp://127.0.0.1:*", "canary_interval_s": 3600.0, **settings}
        self.config = RouterConfig(**settings)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10), "the router did not start"

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.errors: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.router = Router(self.config)
        await self.router.start()
        self._ready.set()
        await self._stop.wait()
        await self.router.stop()

    @property
    def url(self) -> str:
        return self.router.url

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the router's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def wait_ready(self, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            status, body, _ = self.request("GET", "/ready")
            if status == 200:
                return
            time.sleep(0.01)
        raise AssertionError(f"not ready: {body}")

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Send one HTTP request and return status, parsed body and headers. `body`: bytes, or anything that JSON can
        hold."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers or {})
        if data is not None:
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                status, raw, given = response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                status, raw, given = error.code, error.read(), dict(error.headers)
        check_is_declared(method, path, status)
        given = {name.lower(): value for name, value in given.items()}
        return status, json.loads(raw) if given.get("content-type", "").startswith("application/json") else raw, given

    def wait_idle(self, timeout: float = 30.0) -> None:
        """Wait until the router has no request, and no node of its books holds anything."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            left = self.call(self._left)
            if not left:
                return
            time.sleep(0.01)
        raise AssertionError(f"left behind: {left}")

    def _left(self) -> list[Any]:
        dispatcher = self.router.dispatcher
        nodes = [node.node_id for node in dispatcher.registry.nodes.values() if not node.holds_nothing]
        nodes += ["unacknowledged"] * dispatcher.cancels.num_unacked
        nodes += ["reserving"] * len(dispatcher._dispatcher.reservations)
        return [*dispatcher.requests, *nodes, *["waiting"] * dispatcher.queues.num_waiting]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the router did not stop"
        assert not self.errors, self.errors


def check_is_declared(method: str, path: str, status: int) -> None:
    """Check that the OpenAPI document declares the status of the answer."""
    for template, operations in DECLARED.items():
        pattern = re.sub(r"{\w+}", ".+" if template.startswith("/v1") else "[^/]+", template)
        if method.lower() in operations and re.fullmatch(pattern, path.partition("?")[0]):
            statuses = operations[method.lower()]["responses"]
            assert str(status) in statuses, f"{method} {template} answered {status}, which is not declared"


@pytest.fixture
def make_router() -> Iterator[Callable[..., RunningRouter]]:
    routers: list[RunningRouter] = []

    def make(**settings: Any) -> RunningRouter:
        routers.append(RunningRouter(**settings))
        return routers[-1]

    yield make
    for router in routers:
        router.close()


@pytest.fixture(scope="session")
def tokenizer_file() -> bytes:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: bytes) -> TextTokenizer:
    return TextTokenizer(tokenizer_file)


class System:
    """A router with a cluster of fake nodes that say one text."""

    def __init__(self, router: RunningRouter, tokenizer: TextTokenizer, data: bytes, **cluster: Any) -> None:
        self.router = router
        self.tokenizer = tokenizer
        self.text = "the quick brown fox — naïve café"
        script: Script = cluster.pop("script", lambda prompt, choice: self.say(self.text))
        self.cluster = FakeCluster(router.router.node_address, script, tokenizer=data, **cluster)

    @property
    def behaviour(self) -> Behaviour:
        return self.cluster.behaviour

    def say(self, text: str) -> list[int]:
        return [*self.tokenizer.inner.encode(text).ids, 1]

    def up(self, num_prefill: int = 1, num_decode: int = 1) -> System:
        for place in range(num_prefill):
            self.cluster.add("prefill", f"p{place}")
        for place in range(num_decode):
            self.cluster.add("decode", f"d{place}")
        self.router.wait_ready()
        self.router.router.api.early.stop()  # as if it had started long ago
        return self

    def complete(self, **body: Any) -> tuple[int, Any, dict[str, str]]:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 100, **body}
        return self.router.request("POST", "/v1/completions", body)


@pytest.fixture
def make_system(
    make_router: Callable[..., RunningRouter], tokenizer: TextTokenizer, tokenizer_file: bytes
) -> Iterator[Callable[..., System]]:
    systems: list[System] = []

    def make(router: dict[str, Any] | None = None, **cluster: Any) -> System:
        systems.append(System(make_router(**(router or {})), tokenizer, tokenizer_file, **cluster))
        return systems[-1]

    yield make
    for system in systems:
        system.cluster.close()


@pytest.fixture
def system(make_system: Callable[..., System]) -> Iterator[System]:
    """A router with one prefill and one decode node, ready. Afterwards nothing may be left behind."""
    system = make_system().up()
    yield system
    system.router.wait_idle()
