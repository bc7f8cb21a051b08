"""A stand-in for the router, for sizes that would take many real nodes or hours: it serves the real page with the real
headers, and snapshots that a test makes up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

from aiohttp import web

from baton.router.http.page.files import HEADERS, STATIC

BOUNDS = [0.01, 0.1, 1.0]
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def node(name: str, role: str, **more: Any) -> dict[str, Any]:
    """Return a node of a snapshot."""
    counters = {"steps": 0, "computed_tokens": 0, "cached_tokens": 0, "generated_tokens": 0, "preemptions": 0}
    counters |= {"bytes_moved": 0, "transfer_seconds": 0.0, "num_rounds": 0, "num_drafted": 0, "accepted_at": []}
    values = {"id": name, "role": role, "model": "demo", "group": None, "rank": 0, "num_ranks": 1, "state": "ready"}
    values |= {"why": "", "last_seen_s": 0.2, "phase": "step", "phase_age_s": 0.0, "step": 1, "counters": counters}
    values |= {"pages": {"total": 512, "free": 400, "request": 60, "ticket": 12, "cache": 39, "padding": 1}}
    values |= {"free_pages": 440, "num_pages": 512, "page_size": 16, "max_running": 32, "running": 3, "waiting": 0}
    return {**values, "tickets": 0, "queued_tokens": 0, "round_s": 0.01, **more}


def request(rid: str, stage: str = "decode", **more: Any) -> dict[str, Any]:
    """Return a live request of a snapshot."""
    values = {"rid": rid, "model": "demo", "stage": stage, "node": "decode-0", "prefill": "prefill-0"}
    return {**values, "decode": "decode-0", "num_prompt": 10, "num_tokens": 3, "age_s": 1.2, "why": "", **more}


def finished(rid: str, **more: Any) -> dict[str, Any]:
    """Return a line of the list of requests."""
    values = {"rid": rid, "client_id": None, "model": "demo", "outcome": "done", "received_at": time.time()}
    values |= {"total_s": 1.5, "ttft_s": 0.1, "num_prompt": 10, "num_tokens": 20, "num_moves": 0}
    return {**values, "longest": "decode", "longest_s": 1.2, **more}


def snapshot(nodes: list[dict[str, Any]], requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a snapshot. All pairs are ready."""
    histogram = {"bounds_s": BOUNDS, "counts": [0] * (len(BOUNDS) + 1)}
    totals = {
        "requests": {"done": 0, "failed": 0, "cancelled": 0, "refused": 0},
        "prompt_tokens": 0,
        "cached_tokens": 0,
    }
    totals |= {"output_tokens": 0, "transfer_bytes": 0, "transfer_pages": 0, "moves": 0, "preemptions": 0}
    totals |= {"num_rounds": 0, "num_drafted": 0, "accepted_at": [0, 0]}
    prefills, decodes = ([each["id"] for each in nodes if each["role"] == role] for role in ("prefill", "decode"))
    pairs = [{"prefill": a, "decode": b, "state": "ready", "why": ""} for a in prefills for b in decodes]
    router = {"version": "0", "epoch": "one", "uptime_s": 5.0, "is_ready": True, "is_draining": False, "reason": None}
    values = {"at": 0.0, "sees": "everything", "router": router, "models": ["demo"], "totals": totals, "nodes": nodes}
    values |= {"counts": {"waiting": 0, "running": len(requests)}, "pairs": pairs, "requests": requests, "waits": []}
    values |= {"latencies": dict.fromkeys(("ttft", "itl", "queue", "handoff"), histogram)}
    return {**values, "num_requests": len(requests), **more}


class StandIn:
    """The stand-in, in a thread. `now` is the snapshot that is sent every `interval_s`; `each` may change it before."""

    def __init__(self, now: dict[str, Any], interval_s: float = 0.2) -> None:
        self.now, self.interval_s = now, interval_s
        self.lines: list[dict[str, Any]] = []  # of GET /debug/requests
        self.trace: dict[str, Any] = {}  # of GET /debug/requests/{rid}
        self.each = lambda: None
        self.num_streams = 0
        self.asked: list[str] = []  # path and query of each request
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> StandIn:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/live", self._live)
        app.router.add_get("/debug/requests", self._requests)
        app.router.add_get("/debug/requests/{rid}", self._trace)
        app.router.add_get("/{path:.*}", self._file)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _file(self, http_request: web.Request) -> web.Response:
        self.asked.append(http_request.path_qs)
        path = STATIC / (http_request.path.removeprefix("/page/").strip("/") or "index.html")
        return web.Response(body=path.read_bytes(), headers={**HEADERS, "Content-Type": TYPES[path.suffix]})

    async def _requests(self, http_request: web.Request) -> web.Response:
        self.asked.append(http_request.path_qs)
        limit = int(http_request.query.get("limit", 50))
        return web.json_response({"requests": self.lines[:limit], "most_finished": 1024})

    async def _trace(self, _: web.Request) -> web.Response:
        return web.json_response({"requests": [self.trace]})

    async def _live(self, http_request: web.Request) -> web.StreamResponse:
        self.asked.append(http_request.path_qs)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http_request)
        self.num_streams += 1
        try:
            while not self._stop.is_set():
                self.each()
                router = {**self.now["router"], "uptime_s": time.monotonic()}
                data = json.dumps({**self.now, "at": time.time(), "router": router})
                await response.write(f"event: snapshot\ndata: {data}\n\n".encode())
                await asyncio.sleep(self.interval_s)
        except ConnectionError:
            pass
        finally:
            self.num_streams -= 1
        return response
