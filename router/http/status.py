"""GET /health, GET /ready, GET /metrics and GET /version, for probes and monitoring."""

from __future__ import annotations

import time

from aiohttp import web

from ...metadata.errors import Unavailable
from ..availability import degraded
from ..errors import NoNode
from ..metrics import CONTENT_TYPE
from .access import CALLER
from .admin_types import HealthAnswer, ReadyAnswer
from .api import Api, json_response
from .openai_types import Version
from .openapi import package_version


async def health(api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /health: the process answers."""
    return json_response(HealthAnswer("ok", _local_prefill(api)))


async def ready(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /ready. Raises Unavailable while no request could be served. Operators are told of degraded nodes."""
    if api.is_draining:
        raise Unavailable("the router is shutting down")
    if not api.dispatcher.health.is_ready:
        raise NoNode("no request could be served now", api.dispatcher.health.reason)
    registry, is_operator = api.dispatcher.registry, api.access.may_operate(http_request[CALLER])
    found = degraded(registry.nodes.values(), registry.histories, time.monotonic()) if is_operator else []
    return json_response(ReadyAnswer("ready", _local_prefill(api), found))


async def metrics(api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /metrics, in Prometheus' text format."""
    return web.Response(body=api.metrics.page(), headers={"Content-Type": CONTENT_TYPE})


async def version(_api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /version."""
    return json_response(Version(package_version()))


def _local_prefill(api: Api) -> list[str]:
    groups = api.dispatcher.registry.groups.values()
    return sorted({group.placement_words for group in groups if group.local_nodes()})
