"""A real router in a thread, and real nodes of a small model that the test itself steps, one after the other.

So a test decides between which two steps a node dies, leaves or hears of something; nothing depends on how fast the
machine is.

    with Served(model) as served:
        served.start("prefill"), served.start("decode")
        stream = served.ask(prompt="hello", max_tokens=20)
        served.run(lambda: stream.num_tokens >= 3)
        served.kill("decode-0")
        served.finish(stream)
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from local_nodes import start_decode, start_prefill
from patience import Patience

from baton.decode_node.config import DecodeConfig
from baton.decode_node.node import DecodeNode
from baton.prefill_node.config import PrefillConfig
from baton.prefill_node.node import PrefillNode
from baton.router.config import RouterConfig
from baton.router.dispatching.runner import RunningDispatcher
from baton.router.main import Router

Node = PrefillNode | DecodeNode


class Stream:
    """One streamed request in its own thread, and its results by choice."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.ids: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.finish: dict[int, tuple[str, Any]] = {}
        self.usage: dict[str, Any] = {}
        self.errors: list[dict[str, Any]] = []
        self.rid = ""
        self.is_over = False
        self._body = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **body}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, of all choices."""
        return sum(map(len, self.ids.values()))

    @property
    def outcome(self) -> dict[str, Any]:
        """Everything that must not depend on how it was computed, except log-probabilities, which are only near."""
        details = self.usage.get("prompt_tokens_details") or {}
        usage = [self.usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        return {
            "ids": self.ids,
            "texts": self.texts,
            "finish": self.finish,
            "usage": [*usage, details.get("cached_tokens")],
            "errors": self.errors,
        }

    def leave(self) -> None:
        """Close the client's connection without a message."""
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join(10)
        assert not self._thread.is_alive(), "the stream hangs"

    def _read(self) -> None:
        try:
            self._connection.request("POST", "/v1/completions", json.dumps(self._body))
            response = self._connection.getresponse()
            if response.status != 200:
                self.errors.append(json.loads(response.read())["error"])
            else:
                for line in response:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
        except (OSError, ValueError, http.client.HTTPException):
            pass  # the client has left
        finally:
            self._connection.close()
            self.is_over = True

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.rid = event["id"]
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in self.finish, f"choice {index} goes on after its end"
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.logprobs.setdefault(index, []).extend((choice.get("logprobs") or {}).get("token_logprobs", ()))
            self.ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            if choice["finish_reason"] is not None:
                self.finish[index] = (choice["finish_reason"], choice.get("stop_reason"))


class Served:
    """A router and nodes. `both`: settings of every node. `lease_s` is long unless a test sets it, so that things
    become free without the end of a lease."""

    def __init__(
        self, model: Path, *, router: dict[str, Any] | None = None, lease_s: float = 30.0, **both: Any
    ) -> None:
        self._lease_s = lease_s
        self.model, self.both = model, {"page_size": 4, "chunk_tokens": 6, "num_pages": 128, "max_running": 16, **both}
        self.nodes: dict[str, Node] = {}
        self.held: set[str] = set()  # nodes that are not stepped
        self._settings = {"port": 0, "node_address": "tcp://127.0.0.1:*", "canary_interval_s": 3600.0, **(router or {})}
        self._start_router()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.nodes):
            self.kill(name)
        self.stop_router()

    # --- the router ---

    @property
    def dispatcher(self) -> RunningDispatcher:
        return self._router.dispatcher

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the router's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def stop_router(self) -> None:
        """Stop the router without a message, as SIGKILL would."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive() and not self._faults, self._faults

    def _start_router(self) -> None:
        is_up = threading.Event()
        self._faults: list[dict[str, Any]] = []

        async def run() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._loop.set_exception_handler(lambda _, context: self._faults.append(context))
            self._router = Router(RouterConfig(**self._settings))
            await self._router.start()
            is_up.set()
            await self._stop.wait()
            await self._router.stop()

        self._thread = threading.Thread(target=lambda: uvloop.run(run()), daemon=True)
        self._thread.start()
        assert is_up.wait(10), "the router did not start"

    # --- nodes ---

    def start(self, role: str, name: str | None = None, **settings: Any) -> Node:
        """Start a node, which joins as it is stepped. If a node of that name has just gone, wait until the router has
        noticed, because a real process takes longer to start."""
        name = name or f"{role}-{len([each for each in self.nodes if each.startswith(role)])}"
        deadline = time.monotonic() + 5.0
        while name in self.known_nodes() and time.monotonic() < deadline:
            time.sleep(0.002)
        common = {"router": self._router.node_address, "model": str(self.model), "device": "cpu", "threads": 1}
        chosen = {**common, **self.both, **settings}
        if role == "prefill":
            self.nodes[name] = start_prefill(name, PrefillConfig(**chosen), lease_s=self._lease_s)
        else:
            self.nodes[name] = start_decode(name, DecodeConfig(**chosen))
        return self.nodes[name]

    def up(self, num_prefill: int = 1, num_decode: int = 1) -> Served:
        """Start nodes, and step them until every pair has passed its canary, and every decode node that may get local
        prompts."""
        for role, count in (("prefill", num_prefill), ("decode", num_decode)):
            for _ in range(count):
                self.start(role)
        num_alone = num_decode if self._settings.get("local_prefill") == "always" else 0
        self.run(lambda: self._num_ready() == num_prefill * num_decode and self._num_alone() == num_alone)
        return self

    def kill(self, name: str) -> None:
        """Close all connections of the node without a message, as SIGKILL would."""
        node = self.nodes.pop(name)
        self.held.discard(name)
        node.membership.send_all = lambda message: None  # type: ignore[method-assign] - no last words
        node.membership.close()
        client = node._client if isinstance(node, PrefillNode) else node.handoff
        if client is not None:
            client._transfers.clear()
        node.links.close()

    def step(self) -> None:
        """Step every node once, except those that are held."""
        is_busy = False
        for name, node in list(self.nodes.items()):
            if name not in self.held:
                node.membership.enter("stepped by the test", 60.0)
                is_busy |= node.step()
                node.membership.report()
        time.sleep(0.0005 if is_busy else 0.002)  # the router's turn

    def run(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Step until the condition holds. The limit is stretched on a busy machine (clusters/patience.py)."""
        patience = Patience(timeout_s)
        while not condition():
            self.step()
            assert not patience.is_over(), {name: node.units() for name, node in self.nodes.items()}

    def known_nodes(self) -> set[str]:
        """Return the names of the nodes that the router counts as members."""
        return self.call(lambda: {node.node_id for node in self.dispatcher.registry.nodes.values()})

    def _num_ready(self) -> int:
        def count() -> int:
            groups = self.dispatcher.registry.groups.values()
            return sum(self.dispatcher.health.state(*pair) == "ready" for group in groups for pair in group.pairs())

        return self.call(count)

    def _num_alone(self) -> int:
        """Return how many decode nodes may get local prompts."""

        def count() -> int:
            groups = self.dispatcher.registry.groups.values()
            return sum(self.dispatcher.health.is_usable(None, node) for group in groups for node in group.local_nodes())

        return self.call(count)

    # --- clients ---

    @property
    def url(self) -> str:
        """Where the router serves HTTP."""
        return self._router.url

    def ask(self, **body: Any) -> Stream:
        """Send a streamed completion request."""
        port = int(self._router.url.rpartition(":")[2])
        return Stream(port, {"model": self.model.name, **body})

    def finish(self, *streams: Stream, timeout_s: float = 60.0) -> None:
        """Step until the streams are over."""
        self.run(lambda: all(stream.is_over for stream in streams), timeout_s)
        for stream in streams:
            stream.join()

    def holder(self, role: str, stream: Stream | None = None) -> str | None:
        """Return the name of a node of a role that holds a client's unit (of this stream)."""
        for name, node in self.nodes.items():
            for unit in node.units() if name.startswith(role) else ():
                if not unit.rid.startswith("canary") and (stream is None or unit.rid == stream.rid):
                    return name
        return None

    def check_books(self) -> None:
        """Check that nothing is held within about a second, and that every page can be freed."""
        self.run(lambda: not self.held_by_nodes() and not self.call(lambda: self.dispatcher.requests), 10.0)
        for node in self.nodes.values():
            assert not isinstance(node, PrefillNode) or not node.prompts.keys, node.prompts.keys
            node.cache.flush()
            ledger = node.cache.ledger()
            assert ledger.free + ledger.padding == node.cache.pool.num_pages, ledger

    def held_by_nodes(self) -> list[str]:
        """Return in words what each node holds."""
        found: list[str] = []
        for name, node in self.nodes.items():
            ledger = node.cache.ledger()
            if node.units() or node.tickets() or ledger.request or ledger.ticket or ledger.cache_referenced:
                found.append(f"{name}: {node.units()} {node.tickets()} {ledger}")
        return found
