"""Conversion of a body's fields into the parameters that nodes get.

A body that is well-formed but cannot be served is refused here. Every refusal names its field.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from ....metadata.errors import RequestError
from ....metadata.wire.request import FROM_CHECKPOINT, MAX_CONTEXT, SamplingParams
from ...nodes.node import NodeGroup
from ...requests.delta import TextOptions
from ...requests.request import Request
from .idempotency import SEED_BITS
from .types import ChatRequest, CommonRequest, CompletionRequest

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


def check_completion(body: CompletionRequest) -> None:
    """Raise RequestError for a field that /v1/completions does not serve."""
    _check_common(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            f"best_of: {body.best_of} differs from n = {body.n or 1}; only equal is served", param="best_of"
        )
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens: 0 needs echo to be true, which returns the prompt", param="max_tokens")
    if body.received_token_ids and (body.echo or (body.n or 1) > 1):
        raise RequestError(
            "received_token_ids: continues one output, so n must be 1 and echo false", param="received_token_ids"
        )


def check_chat(body: ChatRequest) -> None:
    """Raise RequestError for a field that /v1/chat/completions does not serve."""
    _check_common(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError("continue_final_message: excludes add_generation_prompt", param="continue_final_message")
    if body.thinking_token_budget is not None and body.ignore_eos:
        raise RequestError(
            "ignore_eos: excludes thinking_token_budget, whose end is the end of the text", param="ignore_eos"
        )


def sampling_params(
    body: CommonRequest,
    group: NodeGroup,
    prompt_len: int,
    *,
    num_logprobs: int | None,
    seed: int,
    grammar: str | None,
    ends_with_context: bool = False,
) -> SamplingParams:
    """Return the parameters for one prompt. `grammar` binds the output.

    Raises RequestError if prompt and max_tokens exceed the context, unless `ends_with_context`: then the output ends at
    the end of the context.
    """
    card = group.card
    eos = () if body.ignore_eos else card.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*eos, *(body.stop_token_ids or ()))))
    _check_ids("stop_token_ids", stop_ids, card.vocab_size)
    _check_ids("logit_bias", body.logit_bias or (), card.vocab_size)
    max_tokens = _max_tokens(body, prompt_len, group.context_len, ends_with_context=ends_with_context)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens: {min_tokens} is above max_tokens = {max_tokens}", param="min_tokens")

    asked: dict[str, Any] = {name: getattr(body, name) for name in FROM_CHECKPOINT}
    chosen = {name: card.defaults.get(name) if value is None else value for name, value in asked.items()}
    top_k = max(0, int(chosen.pop("top_k") or 0))
    return SamplingParams(
        max_tokens=max(1, max_tokens),  # a node generates a token after every prompt; the answer may leave it out
        min_tokens=min_tokens,
        top_k=top_k,
        **{name: value for name, value in chosen.items() if value is not None},
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        stop_ids=stop_ids,
        num_logprobs=num_logprobs,
        seed=seed,
        draft_steps=body.draft_steps,
        grammar=grammar,
    )


def continue_after(request: Request, received: Sequence[int]) -> None:
    """Let the first output of a request continue behind the tokens `received` of an earlier answer, if there are any.

    Raises RequestError if a token is outside the vocabulary, or if the output had already ended."""
    if not received:
        return
    params, group = request.params, request.group
    _check_ids("received_token_ids", received, group.card.vocab_size)
    reason = ""
    if len(received) >= params.max_tokens:
        reason = f"it has {len(received)} tokens, and max_tokens is {params.max_tokens}"
    elif received[-1] in params.stop_ids and len(received) > params.min_tokens:
        reason = f"its last token, {received[-1]}, ends the output"
    if reason:
        raise RequestError(f"received_token_ids: {reason}; nothing is left to generate", param="received_token_ids")
    request.sequences[0].continue_after(received)


def asked_tokens(body: CommonRequest, context_len: int) -> int:
    """Return the largest number of output tokens that the body asks for, before its prompts are known."""
    if isinstance(body, ChatRequest):
        return min(body.max_completion_tokens or body.max_tokens or context_len, context_len)
    return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)


def timeout_s(body: CommonRequest, longest_s: float) -> float:
    """Return the seconds that the request may take. Raises RequestError for more than the router's own limit."""
    if body.timeout_s is None:
        return longest_s
    if body.timeout_s > longest_s:
        raise RequestError(
            f"timeout_s: {body.timeout_s:g} is above this router's limit of {longest_s:g} s", param="timeout_s"
        )
    return body.timeout_s


def request_seed(body: CommonRequest, keyed_seed: int | None = None) -> int:
    """Return the request's seed (0..2**62 - 1). If it has none, that of its idempotency key, else a random one."""
    if body.seed is not None:
        return body.seed % 2**SEED_BITS
    return secrets.randbits(SEED_BITS) if keyed_seed is None else keyed_seed


def text_options(body: CommonRequest, markers: Iterable[str] = ()) -> TextOptions:
    """Return the options for turning ids into text. `markers` are texts that a parser must see."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return TextOptions(
        stops=tuple(dict.fromkeys(stops)),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        markers=frozenset(markers),
    )


def template_options(body: ChatRequest) -> dict[str, Any]:
    """Return the variables that the body gives to the chat template, which has no need to know them.

    Raises RequestError for two efforts of reasoning that differ.
    """
    options = body.chat_template_kwargs or {}
    effort = body.reasoning_effort
    if effort is None:
        return options
    if (other := options.get("reasoning_effort", effort)) != effort:
        raise RequestError(
            f"chat_template_kwargs: its reasoning_effort is {other!r:.40}, the request has {effort!r}; give one",
            param="chat_template_kwargs",
        )
    return {**({"enable_thinking": False} if effort == "none" else {}), **options, "reasoning_effort": effort}


def _check_common(body: CommonRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: needs stream to be true", param="stream_options")


def _max_tokens(body: CommonRequest, prompt_len: int, context_len: int, *, ends_with_context: bool) -> int:
    room = context_len - prompt_len
    name, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            name, asked = "max_completion_tokens", body.max_completion_tokens
        if asked is None:
            return min(room, MAX_CONTEXT)
    elif asked is None:
        return min(DEFAULT_COMPLETION_TOKENS, room)
    if asked > room and ends_with_context:
        return room
    if asked > room:
        raise RequestError(
            f"{name}: {asked} more tokens after a prompt of {prompt_len} exceed the context of {context_len}",
            param=name,
        )
    return asked


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{param}: token id {token_id} is out of range; the vocabulary has {vocab_size}", param=param
            )
