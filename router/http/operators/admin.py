"""GET /debug/nodes, GET /debug/ledger and POST /admin/*: the state of nodes and their page ledgers, for operators."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from ....metadata.wire.membership import LedgerReport
from ...nodes.availability import degraded
from ...nodes.node import Node
from ..server.api import Api, json_response
from .admin_types import (
    DrainRequest,
    HeldWork,
    LedgersAnswer,
    ListedNode,
    NodeLedger,
    NodesAnswer,
    NodeState,
    PairState,
    RouterLedger,
)


async def nodes(api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /debug/nodes."""
    dispatcher = api.dispatcher
    registry, health = dispatcher.registry, dispatcher.health
    now = time.monotonic()
    listed = [
        ListedNode(
            **msgspec.structs.asdict(_node_state(node, now)),
            num_restarts=registry.histories.num_restarts(node.node_id),
            proven=health.told(node),
        )
        for node in registry.nodes.values()
    ]
    pairs = [
        PairState(prefill.node_id, decode.node_id, health.state(prefill, decode), health.is_reported(prefill, decode))
        for group in registry.groups.values()
        for prefill, decode in group.pairs()
    ]
    reason = api.why_not_ready()
    return json_response(
        NodesAnswer(
            router_epoch=dispatcher.epoch,
            is_ready=reason is None,
            reason=reason,
            degraded=degraded(registry.nodes.values(), registry.histories, now),
            nodes=listed,
            pairs=pairs,
        )
    )


async def ledger(api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /debug/ledger: the page ledgers of all nodes, and the router's own."""
    return json_response(await _ledgers(api, flush=False))


async def flush(api: Api, _request: web.Request) -> web.StreamResponse:
    """POST /admin/flush: empty the prefix caches of unreferenced pages, then answer the ledgers."""
    return json_response(await _ledgers(api, flush=True))


async def drain(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /admin/nodes/{id}/drain: the node gets no new request; after a time its requests move to other nodes."""
    body = await api.body(http_request, DrainRequest) if http_request.can_read_body else DrainRequest()
    node = api.dispatcher.drain(http_request.match_info["id"], body.timeout_s)
    return json_response(_node_state(node, time.monotonic()))


async def undrain(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /admin/nodes/{id}/undrain: the node gets requests again."""
    node = api.dispatcher.undrain(http_request.match_info["id"])
    return json_response(_node_state(node, time.monotonic()))


async def _ledgers(api: Api, *, flush: bool) -> LedgersAnswer:
    reports = await api.dispatcher.ledgers(flush=flush)
    dispatcher = api.dispatcher
    own = RouterLedger(
        epoch=dispatcher.epoch,
        requests=[rid for rid, request in dispatcher.requests.items() if not request.is_canary],
        canaries=sum(request.is_canary for request in dispatcher.requests.values()),
        waiting=dispatcher.queues.num_waiting,
        unacknowledged_cancels=dispatcher.cancels.num_unacked,
    )
    return LedgersAnswer(own, {name: report and _node_ledger(report) for name, report in reports.items()})


def _node_ledger(report: LedgerReport) -> NodeLedger:
    return NodeLedger(
        pool=report.pool,
        tail_pool=report.tail_pool,
        routers=report.routers,
        host_tier=report.host_tier,
        requests=[str(unit) for unit in report.requests],
        tickets=[str(unit) for unit in report.tickets],
        load=report.load,
        stats=report.stats,
    )


def _node_state(node: Node, now: float) -> NodeState:
    hello, beat = node.hello, node.beat
    return NodeState(
        node_id=hello.node_id,
        epoch=hello.epoch,
        role=hello.role,
        model=hello.model.name,
        is_draining=node.is_draining,
        last_seen_s=round(now - node.last_seen, 3),
        phase=beat.phase if beat is not None else None,
        phase_age_s=beat.phase_age_s if beat is not None else None,
        step=beat.step if beat is not None else None,
        data_address=hello.data_address,
        layout=hello.layout,
        target_fingerprint=hello.target_fingerprint,
        draft_fingerprint=hello.draft_fingerprint,
        commit=hello.commit,
        capacity=hello.capacity,
        load=node.load,
        stats=node.stats,
        has=HeldWork(prefilling=node.num_prompts, units=node.num_units),
    )
