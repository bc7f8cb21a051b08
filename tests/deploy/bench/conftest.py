"""A server with OpenAI's interface that answers by a timetable, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web


@dataclass
class TimetableServer:
    """Answers every request alike: `waits_s` before each token, one token per event.

    `faults` come first, one per request: a status, or a word that `_stream` knows."""

    url: str = ""
    waits_s: list[float] = field(default_factory=lambda: [0.0] * 4)
    faults: list[int | str] = field(default_factory=list)
    key: str | None = None
    vocab_size: int | None = 50
    about: dict[str, Any] = field(default_factory=lambda: {"id": "toy", "max_model_len": 4096, "owned_by": "fake"})
    tokens_per_word: int = 3
    sends_token_ids: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)  # when each request came
    sent_s: dict[str, list[float]] = field(default_factory=dict)  # when each token was sent, by the id of the answer

    def forget(self) -> None:
        """Forget the requests so far."""
        for each in (self.bodies, self.came_s, self.sent_s):
            each.clear()

    async def start(self) -> web.AppRunner:
        """Serve in the loop of the caller, who cleans up."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_get("/tokenizer_info", self.tokenizer)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "the API key is wrong"}}, status=401)
        return web.json_response({"data": [self.about]})

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "7"})

    async def tokenizer(self, _request: web.Request) -> web.Response:
        if self.vocab_size is None:
            return web.Response(status=404)
        return web.json_response({"vocab_size": self.vocab_size})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.came_s.append(time.perf_counter())
        body = await request.json()
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "the queue is full", "code": 7}}, status=fault)
        if fault == "whole":
            return web.json_response({"choices": []})
        rid = f"id-{len(self.bodies)}"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(response, body, rid, fault)
        return response

    async def _stream(self, response: web.StreamResponse, body: Any, rid: str, fault: str | None) -> None:
        is_chat = "messages" in body
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        sent = self.sent_s[rid] = []

        async def event(**fields: Any) -> None:
            await response.write(b"data: " + json.dumps({"id": rid, "object": kind, **fields}).encode() + b"\n\n")

        if is_chat:
            await event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for number, wait_s in enumerate(() if fault == "silent" else self.waits_s[: body["max_tokens"]]):
            await asyncio.sleep(wait_s)
            sent.append(time.perf_counter())
            text = {"delta": {"content": f"t{number} "}} if is_chat else {"text": f"t{number} "}
            ids = {"token_ids": [number]} if body.get("return_token_ids") and self.sends_token_ids else {}
            await event(choices=[{"index": 0, **text, **ids}])
            if fault == "error":
                return await event(error={"message": "a node died"})
            if fault == "break":
                assert response._req is not None and response._req.transport is not None
                return response._req.transport.abort()
        await event(choices=[], usage=self._usage(body, len(sent)))
        return await response.write(b"data: [DONE]\n\n")

    def _usage(self, body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        prompt = body.get("prompt") or " ".join(each["content"] for each in body["messages"])
        num_prompt = len(prompt) if isinstance(prompt, list) else 5 + self.tokens_per_word * len(prompt.split())
        details = {"prompt_tokens_details": {"cached_tokens": 1}}
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, **details}


@pytest.fixture
def server() -> Iterator[TimetableServer]:
    state, started, loop = TimetableServer(), threading.Event(), asyncio.new_event_loop()

    def serve() -> None:
        runner = loop.run_until_complete(state.start())
        started.set()
        loop.run_forever()
        for task in asyncio.all_tasks(loop):  # answers that nobody waits for
            task.cancel()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(10)
    yield state
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    assert not thread.is_alive()
