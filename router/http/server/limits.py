"""Limits of an HTTP request that generates: room for its caller, room in the queue, and the time that it may wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from aiohttp import web

from ....metadata.errors import Overloaded
from ...errors import outcome_of
from ...nodes.node import NodeGroup
from ...requests.request import Request
from ...waiting.queue import Asked
from ..generation.parameters import asked_tokens, timeout_s
from ..generation.types import CommonRequest
from .access import CALLER, Caller
from .api import Api


@contextmanager
def admitted(
    api: Api, http_request: web.Request, body: CommonRequest, group: NodeGroup, num_prompts: int
) -> Generator[None]:
    """Count the request as its caller's while the block runs. No work is done on the prompts before this.

    Raises Overloaded if the caller has too many requests, or if the queue has no room.
    """
    caller = http_request[CALLER]
    asked = Asked(
        num_prompts,
        0,
        asked_tokens(body, group.context_len),
        body.priority or 0,
        timeout_s(body, api.config.request_timeout_s),
        caller.tenant,
    )
    began = time.monotonic()
    with _refusals_counted(api, group, caller), api.access.counted(caller, num_prompts * (body.n or 1)):
        api.dispatcher.check_room(group, asked)
        yield
        api.access.add_duration(time.monotonic() - began)


@contextmanager
def wait_limited(api: Api, requests: Sequence[Request]) -> Generator[None]:
    """Refuse the requests if no node has taken any of them within the longest time that a request may wait."""
    longest_s = api.config.max_queue_s

    def run_out() -> None:
        if not any(request.dispatched_at for request in requests):
            for request in requests:
                api.dispatcher.refuse(request, f"nodes had no room for it in {longest_s:g} s")

    timer = asyncio.get_running_loop().call_later(longest_s, run_out)
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _refusals_counted(api: Api, group: NodeGroup, caller: Caller) -> Generator[None]:
    """Count a request that is refused before it is queued. The dispatcher counts all others."""
    try:
        yield
    except Overloaded as error:
        if error.rid is None:
            api.metrics.count_request(group.key.model, outcome_of(error), caller.tenant.name)
        raise
