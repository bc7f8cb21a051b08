"""What operators and tests ask: who is there, and whose every page is."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ...metadata.wire.messages import LedgerReport
from ..availability import degraded
from ..node import Node
from .openai_types import DrainRequest

if TYPE_CHECKING:
    from ..runner import RunningDispatcher
    from .app import Api

ANSWER_S = 5.0
_drain_decoder = msgspec.json.Decoder(DrainRequest)


class LedgerDesk:
    """Asks nodes for their books, and gives each asker the answers to its own question."""

    def __init__(self, dispatcher: RunningDispatcher) -> None:
        self._dispatcher = dispatcher
        self._next_query = 1
        self._open: dict[int, dict[str, asyncio.Future[LedgerReport]]] = {}
        dispatcher.on_ledger = self._answered

    async def ask(self, *, flush: bool) -> dict[str, LedgerReport | None]:
        """Every node's report; None for nodes that did not answer in time. With `flush` caches are emptied first."""
        query = self._next_query
        self._next_query += 1
        nodes = list(self._dispatcher.registry.nodes.values())
        loop = asyncio.get_running_loop()
        futures = {node.node_id: loop.create_future() for node in nodes}
        self._open[query] = futures
        self._dispatcher.ask_ledgers(query, flush=flush)
        try:
            if futures:
                await asyncio.wait(futures.values(), timeout=ANSWER_S)
        finally:
            del self._open[query]
        return {name: future.result() if future.done() else None for name, future in futures.items()}

    def _answered(self, node: Node, report: LedgerReport) -> None:
        future = self._open.get(report.query, {}).get(node.node_id)
        if future is not None and not future.done():
            future.set_result(report)


async def nodes(api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /debug/nodes."""
    dispatcher, registry = api.dispatcher, api.dispatcher.registry
    now = time.monotonic()
    listed = [_node(node, now) for node in dispatcher.registry.nodes.values()]
    pairs = [
        {"prefill": prefill.node_id, "decode": decode.node_id, "state": dispatcher.health.state(prefill, decode)}
        for group in dispatcher.registry.groups.values()
        for prefill, decode in group.pairs()
    ]
    is_ready = dispatcher.health.is_ready
    return web.json_response(
        {
            "router_epoch": dispatcher.epoch,
            "is_ready": is_ready,
            "reason": None if is_ready else dispatcher.health.reason,
            "degraded": msgspec.to_builtins(degraded(registry.nodes.values(), registry.histories, now)),
            "nodes": [{**each, "num_restarts": registry.histories.num_restarts(each["node_id"])} for each in listed],
            "pairs": pairs,
        }
    )


async def ledger(api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /debug/ledger: the books of all nodes, and what the router itself keeps."""
    return await _books(api, flush=False)


async def flush(api: Api, _request: web.Request) -> web.StreamResponse:
    """POST /admin/flush: empties the prefix caches of unreferenced pages, then reports the books."""
    return await _books(api, flush=True)


async def drain(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /admin/nodes/{id}/drain: the node gets nothing new; after a time what it still holds moves elsewhere."""
    body = await api.body(http_request, _drain_decoder) if http_request.can_read_body else DrainRequest()
    node = api.dispatcher.drain(http_request.match_info["id"], body.timeout_s)
    return web.json_response(_node(node, time.monotonic()))


async def undrain(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /admin/nodes/{id}/undrain: the node gets requests again."""
    node = api.dispatcher.undrain(http_request.match_info["id"])
    return web.json_response(_node(node, time.monotonic()))


async def _books(api: Api, *, flush: bool) -> web.StreamResponse:
    reports = await api.ledgers.ask(flush=flush)
    dispatcher = api.dispatcher
    listed = {name: _report(report) if report is not None else None for name, report in reports.items()}
    own = {
        "requests": [rid for rid, request in dispatcher.requests.items() if not request.is_canary],
        "canaries": sum(request.is_canary for request in dispatcher.requests.values()),
        "waiting": dispatcher.queues.num_waiting,
        "unacknowledged_cancels": dispatcher.cancels.num_unacked,
    }
    return web.json_response({"router": own, "nodes": listed})


def _report(report: LedgerReport) -> dict[str, Any]:
    return {
        "pool": msgspec.to_builtins(report.pool),
        "requests": [str(unit) for unit in report.requests],
        "tickets": [str(unit) for unit in report.tickets],
        "load": msgspec.to_builtins(report.load),
        "stats": msgspec.to_builtins(report.stats),
    }


def _node(node: Node, now: float) -> dict[str, Any]:
    hello, beat = node.hello, node.beat
    return {
        "node_id": hello.node_id,
        "epoch": hello.epoch,
        "role": hello.role,
        "model": hello.model.name,
        "is_draining": node.is_draining,
        "last_seen_s": round(now - node.last_seen, 3),
        "phase": beat.phase if beat is not None else None,
        "phase_age_s": beat.phase_age_s if beat is not None else None,
        "step": beat.step if beat is not None else None,
        "data_address": hello.data_address,
        "layout": msgspec.to_builtins(hello.layout),
        "target_fingerprint": hello.target_fingerprint,
        "draft_fingerprint": hello.draft_fingerprint,
        "capacity": msgspec.to_builtins(hello.capacity),
        "load": msgspec.to_builtins(node.load),
        "stats": msgspec.to_builtins(node.stats),
        "has": {"prefilling": node.num_prompts, "units": node.num_units},
    }
