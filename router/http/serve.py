"""From prompts to an answer: what both generating routes share.

admitted(...)   the caller may have so many sequences, and the queue has room; before any work on the prompts
serve(...)      one request a prompt, submitted, answered, and gone whatever happens
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash
from aiohttp import web

from ...metadata.errors import BatonError, Overloaded
from ..node import Group
from ..queue import Asked
from ..request import Request
from .access import CALLER
from .answers import StreamedAnswer, WholeAnswer
from .explain import ARRIVED
from .openai_types import CommonRequest
from .parameters import asked_tokens, request_seed, sampling_params, text_options, timeout_s
from .response_format import Form

if TYPE_CHECKING:
    from .app import Api


@contextmanager
def admitted(
    api: Api, http_request: web.Request, body: CommonRequest, group: Group, num_prompts: int
) -> Generator[None]:
    """Counts the request as its caller's. Raises Overloaded above the caller's limit or without room to wait."""
    asked = Asked(
        num_prompts,
        0,
        asked_tokens(body, group.context_len),
        body.priority or 0,
        timeout_s(body, api.config.request_timeout_s),
    )
    began = time.monotonic()
    with _refusals_counted(api, group), api.access.under_way(http_request[CALLER], num_prompts * (body.n or 1)):
        api.dispatcher.check_room(group, asked)
        yield
        api.access.lasted(time.monotonic() - began)


async def serve(
    api: Api,
    http_request: web.Request,
    body: CommonRequest,
    group: Group,
    form: Form,
    prompts: list[tuple[str, list[int]]],
    *,
    num_logprobs: int | None,
    wants_prompt_logprobs: bool = False,
) -> web.StreamResponse:
    """Answers for prompts, given as (request id, token ids). Raises what ends them before the first output."""
    dispatcher, config = api.dispatcher, api.config
    request_id = api.request_id(http_request, form.response_id)
    timeout = timeout_s(body, config.request_timeout_s)
    seed, options = request_seed(body), text_options(body)
    salt = xxhash.xxh3_128_hexdigest(body.cache_salt.encode()) if body.cache_salt else ""
    if body.stream:
        answer = StreamedAnswer(http_request, form, body.stream_options, config.max_unread_bytes, dispatcher.set_paused)
    else:
        answer = WholeAnswer(form)
    requests = [
        Request(
            rid,
            group,
            ids,
            sampling_params(body, group, len(ids), num_logprobs=num_logprobs, seed=seed),
            answer,
            num_choices=body.n or 1,
            options=options,
            salt=salt,
            wants_prompt_logprobs=wants_prompt_logprobs,
            now=http_request[ARRIVED],
            priority=body.priority or 0,
            timeout_s=timeout,
        )
        for rid, ids in prompts
    ]
    num_tokens = sum(len(ids) for _, ids in prompts)
    max_tokens = max(request.params.max_tokens for request in requests)
    dispatcher.make_room(group, Asked(len(prompts), num_tokens, max_tokens, body.priority or 0, timeout))
    for request in requests:
        request.timeline.came_from(None if request_id == form.response_id else request_id, http_request.headers)
    ids = {form.response_id, request_id}
    reason = "the client left"
    try:
        with api.under_way.listed(ids, http_request[CALLER], requests), _patience(api, requests):
            answer.start(requests, dispatcher.submit)
            return await answer.answer(requests, api.response_headers(http_request, form.response_id))
    except BatonError:
        reason = "a part of the same request failed"
        raise
    finally:
        for request in requests:
            dispatcher.cancel(request, reason)


@contextmanager
def _refusals_counted(api: Api, group: Group) -> Generator[None]:
    """Counts a request that is refused before any of it is queued: life counts the others."""
    try:
        yield
    except Overloaded as error:
        if error.rid is None:
            api.metrics.count_request(group.key.model, "refused")
        raise


@contextmanager
def _patience(api: Api, requests: Sequence[Request]) -> Generator[None]:
    """Refuses the request when none of it has got nodes in the time that it may wait."""
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
