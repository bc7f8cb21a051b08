"""DELETE /v1/requests/{id}: cancel a request that is generating."""

from __future__ import annotations

from aiohttp import web

from ..generation.types import CancelledRequest
from .access import CALLER
from .api import Api, json_response


async def cancel(api: Api, http_request: web.Request) -> web.StreamResponse:
    """DELETE /v1/requests/{id}. Raises NotFound if the caller has no such request."""
    request_id = http_request.match_info["id"]
    api.in_flight.cancel(request_id, http_request[CALLER])
    return json_response(CancelledRequest(request_id))
