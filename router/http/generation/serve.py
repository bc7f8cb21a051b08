"""How a body is served, whatever its dialect. A handler turns the body into an answer, in seven steps. The files on the
right do the work of a step.

    body       is decoded; unsupported fields are refused         bodies/fields.py, parameters.py
    group      the nodes that serve the model are found           server/api.py
    admitted   the caller and the waiting queue must have room    `admitted`
    tools      the model's tools and its parsers are chosen       tools.py, output.py
    prompts    texts and messages become token ids                prompts.py
    grammar    the grammar of the output is compiled              grammars.py
    serve      the dispatcher gets one Request per prompt; the    answers.py
               client gets a whole answer or a stream

When the handler ends, it cancels the Requests that still run. `cancel` ends them before, by their id.
"""

from __future__ import annotations

import asyncio
import time
from collections import abc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from ....metadata.errors import BatonError, Overloaded
from ...errors import outcome_of
from ...nodes.node import NodeGroup
from ...reasoning_parsers.registry import find_parser
from ...requests.request import Request
from ...text.tokenizer import TextTokenizer
from ...waiting.admission import Asked
from ..server.access import CALLER, Caller, session_id
from ..server.api import ARRIVED, Api, json_response, request_id
from .answers import AnswerFormat, StreamedAnswer, WholeAnswer
from .grammars import asked_grammar, chat_grammar
from .idempotency import KEYED_SEED, SEED_HEADER
from .output import OutputReading
from .parameters import asked_tokens, check_chat, continue_after, request_seed, sampling_params, text_options, timeout_s
from .tools import tool_use
from .types import CancelledRequest, ChatRequest, CommonRequest


async def serve_chat(
    api: Api,
    http_request: web.Request,
    body: ChatRequest,
    format_of: Callable[[TextTokenizer, OutputReading | None], AnswerFormat],
) -> web.StreamResponse:
    """Return the answer to a conversation, in the format of the route that it came by; it is given how outputs are
    read. Raises an error that precedes all output."""
    check_chat(body)
    has_format = body.response_format is not None or body.structured_outputs is not None
    if has_format:
        asked_grammar(body)
    group, tokenizer = await api.group_of(http_request, body.model)
    use = None
    if body.tools or body.tool_choice is not None:
        use = tool_use(body, group.template, api.config.tool_parser)
    with admitted(api, http_request, body, group, 1):
        prompt = await api.side_work.chat_prompt(body, group, tokenizer, None if use is None else use.for_template)
        reasoning = None
        if not body.continue_final_message:
            reasoning = find_parser(group.card.chat_template, api.config.reasoning_parser)
        reading, grammar = None, None
        if use is not None or reasoning is not None:
            reading = OutputReading(prompt.text, tokenizer, use, reasoning, api.config.reasoning_field)
        answer_format = format_of(tokenizer, reading)
        if has_format or reading is not None or body.thinking_token_budget is not None:
            grammar = await chat_grammar(api.grammars, body, use, reasoning, prompt.text, group, tokenizer)
        return await serve(
            api,
            http_request,
            body,
            group,
            answer_format,
            [(answer_format.response_id, prompt.ids)],
            markers=frozenset() if reading is None else reading.markers,
            grammar=grammar,
        )


async def serve(
    api: Api,
    http_request: web.Request,
    body: CommonRequest,
    group: NodeGroup,
    answer_format: AnswerFormat,
    prompts: abc.Sequence[tuple[str, abc.Sequence[int]]],
    *,
    wants_prompt_logprobs: bool = False,
    markers: frozenset[str] = frozenset(),
    grammar: str | None,
    received: abc.Sequence[int] = (),
) -> web.StreamResponse:
    """Return the answer for prompts, given as (request id, token ids). Raises an error that precedes all output.

    `markers`: special tokens that the answer's format reads. `grammar` binds all outputs.
    `received`: tokens of the only output that the client has already.
    """
    timeout = timeout_s(body, api.config.request_timeout_s)
    seed, options = request_seed(body, http_request.get(KEYED_SEED)), text_options(body, markers)
    caller = http_request[CALLER]
    cache_salt = api.salts.salt(caller, body.cache_salt)
    session = session_id(http_request.headers, body.prompt_cache_key)
    answer = _new_answer(api, http_request, body, answer_format)
    params_of = partial(
        sampling_params,
        body,
        group,
        num_logprobs=answer_format.num_logprobs,
        seed=seed,
        grammar=grammar,
        ends_with_context=answer_format.ends_with_context,
    )
    requests = [
        Request(
            rid,
            group,
            ids,
            params_of(len(ids)),
            answer,
            num_choices=body.n or 1,
            options=options,
            cache_salt=cache_salt,
            wants_prompt_logprobs=wants_prompt_logprobs,
            marks_drafts=bool(body.stream_options and body.stream_options.include_drafts),
            now=http_request[ARRIVED],
            priority=body.priority or 0,
            timeout_s=timeout,
            tenant=caller.tenant,
            sender=caller.words,
            session=None if session is None else api.salts.session(caller, session),
        )
        for rid, ids in prompts
    ]
    continue_after(requests[0], received)
    num_tokens = sum(len(ids) for _, ids in prompts)
    max_tokens = max(request.params.max_tokens for request in requests)
    asked = Asked(len(prompts), num_tokens, max_tokens, body.priority or 0, timeout, caller.tenant)
    api.dispatcher.make_room(group, asked)
    return await _answered(api, http_request, answer, answer_format.response_id, requests)


async def _answered(
    api: Api,
    http_request: web.Request,
    answer: StreamedAnswer | WholeAnswer,
    response_id: str,
    requests: list[Request],
) -> web.StreamResponse:
    """Submit the requests and return their answer. Cancel those that still run at the end."""
    called = request_id(http_request) or response_id
    for request in requests:
        request.timeline.came_from(None if called == response_id else called, http_request.headers)
    reason = "the client left"
    try:
        end = partial(_abort, api, requests)
        with api.in_flight.listed({response_id, called}, http_request[CALLER], end), wait_limited(api, requests):
            answer.start(requests, api.dispatcher.submit)
            headers = {"x-request-id": called}
            if KEYED_SEED in http_request:
                headers[SEED_HEADER] = str(requests[0].params.seed)
            return await answer.answer(requests, headers)
    except BatonError:
        reason = "a part of the same request failed"
        raise
    finally:
        for request in requests:
            api.dispatcher.cancel(request, reason)
            request.release()


def _new_answer(
    api: Api, http_request: web.Request, body: CommonRequest, answer_format: AnswerFormat
) -> StreamedAnswer | WholeAnswer:
    """Return the answer that the body asks for: a stream, or a whole one."""
    if not body.stream:
        return WholeAnswer(answer_format)
    max_unread_bytes, set_paused = api.config.max_unread_bytes, api.dispatcher.set_paused
    return StreamedAnswer(http_request, answer_format, body.stream_options, max_unread_bytes, set_paused)


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
def wait_limited(api: Api, requests: abc.Sequence[Request]) -> Generator[None]:
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


def _abort(api: Api, requests: abc.Sequence[Request], reason: str) -> bool:
    """End those of the requests that run. Returns False if none does."""
    running = [request for request in requests if not request.is_over]
    for request in running:
        api.dispatcher.abort(request, reason)
    return bool(running)


async def cancel(api: Api, http_request: web.Request) -> web.StreamResponse:
    """DELETE /v1/requests/{id}. Raises NotFound if the caller has no such request."""
    request_id = http_request.match_info["id"]
    api.in_flight.cancel(request_id, http_request[CALLER])
    return json_response(CancelledRequest(request_id))
