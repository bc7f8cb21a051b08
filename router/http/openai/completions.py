"""Handlers of POST /v1/completions and POST /v1/chat/completions.

A handler turns the body of a request into an answer, in seven steps. The files on the right do the work of a step.

    body       is decoded; unsupported fields are refused         parameters.py
    group      the nodes that serve the model are found           api.py
    admitted   the caller and the waiting queue must have room    limits.py
    tools      the model's tools and an output parser are chosen  tools.py, output_readings.py
    prompts    texts and messages become token ids                prompts.py
    grammar    the grammar of the output is compiled              grammars.py, bound_calls.py, chat_grammar.py
    serve      the dispatcher gets one Request per prompt; the    answers.py, format.py
               client gets a whole answer or a stream

When the handler ends, it cancels the Requests that still run.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from ....metadata.errors import BatonError
from ...nodes.node import NodeGroup
from ...requests.request import Request
from ...text.tokenizer import TextTokenizer
from ...waiting.queue import Asked
from ..generation.answers import StreamedAnswer, WholeAnswer
from ..generation.chat_grammar import chat_grammar
from ..generation.grammars import asked_grammar, grammar_of
from ..generation.output_readings import OutputReading, markers_of, output_reading, reasoning_parser
from ..generation.parameters import check_chat, check_completion, request_seed, sampling_params, text_options, timeout_s
from ..generation.prompts import prompts_of
from ..generation.sessions import session_id
from ..generation.tools import tool_use
from ..generation.types import ChatRequest, CommonRequest, CompletionRequest
from ..server.access import CALLER
from ..server.api import ARRIVED, Api, request_id
from ..server.limits import admitted, wait_limited
from .format import AnswerFormat, ChatFormat, CompletionFormat

_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)


async def completions(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    rid = api.new_id(http_request, "cmpl")
    body = await api.body(http_request, _completion_decoder)
    check_completion(body)
    asked = asked_grammar(body)
    group, tokenizer = api.group_of(body.model)
    prompts = prompts_of(body)
    with admitted(api, http_request, body, group, len(prompts)):
        encoded = await api.side_work.encoded_prompts(
            prompts,
            group,
            tokenizer,
            add_special_tokens=body.add_special_tokens is not False,
            num_kept=body.truncate_prompt_tokens,
            is_scored_alone=body.max_tokens == 0,
        )
        rids = [rid] if len(prompts) == 1 else [f"{rid}-{index}" for index in range(len(prompts))]
        echoed = None
        if body.echo:
            unread = [prompt.ids for prompt in encoded if prompt.text is None]
            read = iter(await api.side_work.decoded(unread, group, tokenizer) if unread else ())
            texts = [next(read) if prompt.text is None else prompt.text for prompt in encoded]
            echoed = dict(zip(rids, texts, strict=True))
        answer_format = CompletionFormat(
            rid,
            body.model,
            tokenizer,
            num_logprobs=body.logprobs,
            with_ids=bool(body.return_token_ids),
            prompt_texts=echoed,
            given_texts=[rid for rid, prompt in zip(rids, encoded, strict=True) if prompt.text is not None],
            has_output=body.max_tokens != 0,
        )
        return await _serve(
            api,
            http_request,
            body,
            group,
            answer_format,
            [(rid, prompt.ids) for rid, prompt in zip(rids, encoded, strict=True)],
            wants_prompt_logprobs=bool(body.echo) and body.logprobs is not None,
            grammar=None if asked is None else await grammar_of(api, asked, group),
        )


async def chat_completions(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    rid = api.new_id(http_request, "chatcmpl")
    body = await api.body(http_request, _chat_decoder)

    def format_of(tokenizer: TextTokenizer, reading: OutputReading | None) -> AnswerFormat:
        return ChatFormat(
            rid,
            body.model,
            tokenizer,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            with_ids=bool(body.return_token_ids),
            reading=reading,
        )

    return await serve_chat(api, http_request, body, format_of)


async def serve_chat(
    api: Api,
    http_request: web.Request,
    body: ChatRequest,
    format_of: Callable[[TextTokenizer, OutputReading | None], AnswerFormat],
) -> web.StreamResponse:
    """Return the answer to a conversation, in the format of the route that it came by; it is given how outputs are
    read. Raises an error that precedes all output."""
    check_chat(body)
    asked_grammar(body)
    group, tokenizer = api.group_of(body.model)
    use = tool_use(body, group.template, api.config.tool_parser)
    with admitted(api, http_request, body, group, 1):
        prompt = await api.side_work.chat_prompt(body, group, tokenizer, None if use is None else use.for_template)
        reasoning = None
        if not body.continue_final_message:
            reasoning = reasoning_parser(group.template, api.config.reasoning_parser)
        reading = output_reading(use, reasoning, prompt.text, tokenizer, api.config.reasoning_field)
        answer_format = format_of(tokenizer, reading)
        return await _serve(
            api,
            http_request,
            body,
            group,
            answer_format,
            [(answer_format.response_id, prompt.ids)],
            markers=markers_of(use, reasoning),
            grammar=await chat_grammar(api, body, use, reasoning, prompt.text, group, tokenizer),
        )


async def _serve(
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
) -> web.StreamResponse:
    """Return the answer for prompts, given as (request id, token ids). Raises an error that precedes all output.

    `markers`: special tokens that the answer's format reads. `grammar` binds all outputs.
    """
    timeout = timeout_s(body, api.config.request_timeout_s)
    seed, options = request_seed(body), text_options(body, markers)
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
            now=http_request[ARRIVED],
            priority=body.priority or 0,
            timeout_s=timeout,
            tenant=caller.tenant,
            sender=caller.words,
            session=None if session is None else api.salts.session(caller, session),
        )
        for rid, ids in prompts
    ]
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
        in_flight = api.in_flight.listed({response_id, called}, http_request[CALLER], requests)
        with in_flight, wait_limited(api, requests):
            answer.start(requests, api.dispatcher.submit)
            return await answer.answer(requests, {"x-request-id": called})
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
