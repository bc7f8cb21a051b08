"""A small HTTP server that streams answers as the router does."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Server:
    """Streams `answer n` to the n-th question. Some questions fail; `slow` streams until the client leaves."""

    url: str = ""
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


def _send(handler: http.server.BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _send(self, 200, {"data": [{"id": "toy"}]})

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
