"""GET /health, GET /ready, GET /metrics and GET /version, for probes and monitoring."""

from __future__ import annotations

import time

from aiohttp import web

from ....metadata.errors import Unavailable
from ....metadata.version import package_version
from ...errors import NoNode
from ...figures.metrics import CONTENT_TYPE
from ...nodes.availability import degraded
from ..generation.types import Version
from ..server.access import IS_OPERATOR
from ..server.api import Api, json_response
from .admin_types import HealthAnswer, ReadyAnswer


async def health(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /health: the process answers."""
    return json_response(HealthAnswer("ok", _local_prefill(api) if http_request[IS_OPERATOR] else []))


async def ready(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /ready. Raises Unavailable while no request could be served, or a node that was started with the router has
    not joined yet. Nobody but operators is told of models and nodes; all others read how many nodes are here."""
    if api.is_draining:
        raise Unavailable("the router is shutting down")
    registry = api.dispatcher.registry
    reason = api.why_not_ready()
    if reason is not None:
        raise NoNode(f"no request could be served now: {api.joined_words}", reason)
    is_operator = http_request[IS_OPERATOR]
    found = degraded(registry.nodes.values(), registry.histories, time.monotonic()) if is_operator else []
    local_prefill = _local_prefill(api) if is_operator else []
    return json_response(ReadyAnswer("ready", local_prefill, found))


async def metrics(api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /metrics, in Prometheus' text format."""
    return web.Response(body=api.metrics.page(), headers={"Content-Type": CONTENT_TYPE})


async def version(_api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /version."""
    return json_response(Version(package_version()))


def _local_prefill(api: Api) -> list[str]:
    groups = api.dispatcher.registry.groups.values()
    return sorted({group.placement_words for group in groups if group.local_nodes()})
