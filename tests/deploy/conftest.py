"""A small HTTP server that streams answers as the router does, and snapshots as GET /live answers them."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.router.http.page.types import (
    EndedRequests,
    Latencies,
    LatencyBuckets,
    LiveCounts,
    LiveNode,
    LiveRouter,
    LiveTotals,
    NodeCounters,
    Snapshot,
)


@dataclass
class Server:
    """Streams `answer n` to the n-th question. Some questions fail; `slow` streams until the client leaves.

    `pages`: status and body (or what makes it) of GET, by path; every other path lists a model."""

    url: str = ""
    pages: dict[str, tuple[int, bytes | Callable[[], bytes]]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def answer(self, handler: http.server.BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        question = body["messages"][-1]["content"]
        if question == "refuse":
            return _send(handler, 400, {"error": {"message": "no such thing", "param": "messages"}})
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        _event(handler, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if question == "break off":
            return None
        if question == "fail":
            return _event(handler, {"error": {"message": "a node died"}})
        try:
            while question == "slow":
                _event(handler, {"choices": [{"index": 0, "delta": {"content": "x"}}]})
                time.sleep(0.02)
        except OSError:
            return self.left.set()
        for text in ["answer ", f"{len(self.requests)}", " ü"]:
            _event(handler, {"choices": [{"index": 0, "delta": {"content": text}}]})
        handler.wfile.write(b":\n\n")  # a comment: the router sends some
        reason = question.removeprefix("end ") if question.startswith("end ") else "stop"
        _event(handler, {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        _event(handler, {"choices": [], "usage": {"prompt_tokens": 1}})
        handler.wfile.write(b"data: [DONE]\n\n")
        return None


def _event(handler: http.server.BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
    handler.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _send(handler: http.server.BaseHTTPRequestHandler, status: int, body: dict[str, Any] | bytes) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = state.pages.get(self.path, (200, b'{"data": [{"id": "toy"}]}'))
            _send(self, status, body() if callable(body) else body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append(body)
            state.keys.append(self.headers["Authorization"])
            state.answer(self, body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        state.url = f"http://127.0.0.1:{http_server.server_address[1]}"
        yield state
        http_server.shutdown()
        thread.join()


def node(
    name: str = "decode-0",
    state: Any = "ready",
    why: str = "",
    *,
    steps: int = 10,
    computed: int = 0,
    generated: int = 0,
    drafts: tuple[int, int, int] = (0, 0, 0),
) -> LiveNode:
    """Return a node. `drafts`: rounds, drafted tokens, accepted tokens."""
    rounds, drafted, accepted = drafts
    counters = NodeCounters(
        steps=steps,
        computed_tokens=computed,
        cached_tokens=0,
        generated_tokens=generated,
        preemptions=0,
        bytes_moved=1_000_000 * generated,
        transfer_seconds=0.0,
        num_rounds=rounds,
        num_drafted=drafted,
        accepted_at=(accepted - accepted // 3, accepted // 3),
    )
    role: Any = name.split("-")[0]
    seen: Any = {"group": None, "rank": 0, "num_ranks": 1, "last_seen_s": 0.1, "max_running": 8}
    return LiveNode(id=name, role=role, model="demo", state=state, why=why, counters=counters, **seen)


def snapshot(
    at: float = 100.0,
    *nodes: LiveNode,
    epoch: str = "first",
    uptime_s: float | None = None,
    reason: str | None = None,
    done: int = 0,
    failed: int = 0,
    tokens: int = 0,
    moves: int = 0,
    prompts: tuple[int, int] = (0, 0),
    ttft: tuple[int, ...] = (0, 0, 0, 0),
    drafts: tuple[int, int, int] = (0, 0, 0),
    **more: Any,
) -> Snapshot:
    """Return a snapshot. `prompts`: tokens, and how many of them were cached; `drafts`: as of `node`."""
    rounds, drafted, accepted = drafts
    prompt_tokens, cached_tokens = prompts
    bounds = (0.1, 0.2, 0.4)
    empty = LatencyBuckets(bounds, [0, 0, 0, 0])
    return Snapshot(
        at=at,
        sees=more.pop("sees", "everything"),
        router=LiveRouter(
            version="0.1.0",
            epoch=epoch,
            uptime_s=at - 50.0 if uptime_s is None else uptime_s,
            is_ready=reason is None,
            is_draining=False,
            reason=reason,
        ),
        models=["demo"],
        counts=more.pop("counts", LiveCounts(0, 0)),
        totals=LiveTotals(
            requests=EndedRequests(done=done, failed=failed, cancelled=0, refused=0),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=tokens,
            transfer_bytes=0,
            transfer_pages=0,
            moves=moves,
            preemptions=0,
            num_rounds=rounds,
            num_drafted=drafted,
            accepted_at=[accepted],
        ),
        latencies=Latencies(ttft=LatencyBuckets(bounds, list(ttft)), itl=empty, queue=empty, handoff=empty),
        nodes=list(nodes),
        **more,
    )
