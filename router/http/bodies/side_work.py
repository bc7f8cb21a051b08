"""Work on large bodies, done in processes beside the router, because long work in the event loop holds up all streams.

Small bodies are worked on in the event loop, by the same functions. Callers take turns at the processes
(fair_turns.py). The kernel ends a process whose piece of work takes more than MAX_CPU_S of the processor.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
import xxhash
from msgspec import Struct

from ....metadata.errors import BatonError, RequestError, Unavailable
from ....metadata.wire.node_info import ModelCard
from ....metadata.wire.request import ids_column, pack_ids, unpack_ids
from ...nodes.node import NodeGroup
from ...tenants.fair_turns import FairTurns
from ...text.chat_template import ChatTemplate
from ...text.side_process import SideProcess, serve
from ...text.tokenizer import TextTokenizer
from ..anthropic.types import CountTokensRequest, MessagesRequest
from ..generation.prompts import (
    ChatPrompt,
    EncodedPrompt,
    Prompt,
    chat_prompt,
    check_vocabulary,
    encoded_prompt,
    prompts_of,
    tokenized,
)
from ..generation.tool_types import ToolCall
from ..generation.types import ChatMessage, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ..operators.admin_types import DrainRequest
from ..responses.input import messages_of
from ..responses.types import ResponsesRequest
from .bodies import BODY_SIZE, BodySize, decoded_mended, decoded_strictly, exact_size, mend
from .fields import decoder_of

MAX_CPU_S = 15.0  # seconds of the processor per piece of work
MAX_WAITING = 256  # pieces of work of one caller
MAX_MODELS = 8
NUM_PROCESSES = min(2, os.cpu_count() or 1)

_T = TypeVar("_T", bound=Struct)


class _Model(Struct, frozen=True, array_like=True, tag=True):
    name: str
    model: str
    card: ModelCard
    tokenizer: bytes


class _Size(Struct, frozen=True, array_like=True, tag=True):
    body: bytes
    most_plain: int


class _Mend(Struct, frozen=True, array_like=True, tag=True):
    body: bytes
    kind: str  # name of a route's type of body


class _Body(Struct, frozen=True, array_like=True, tag=True):
    body: bytes
    kind: str  # CompletionRequest or DetokenizeRequest


class _Input(Struct, frozen=True, array_like=True, tag=True):
    body: bytes  # a ResponsesRequest of model, instructions and input


class _Chat(Struct, frozen=True, array_like=True, tag=True):
    name: str
    context_len: int
    body: bytes
    tools: bytes


class _Prompts(Struct, frozen=True, array_like=True, tag=True):
    name: str
    context_len: int
    texts: list[str | None]  # None: the next of `ids`
    ids: list[bytes]
    add_special_tokens: bool
    num_kept: int | None
    is_scored_alone: bool


class _Tokenize(Struct, frozen=True, array_like=True, tag=True):
    name: str
    context_len: int
    body: bytes


class _Decode(Struct, frozen=True, array_like=True, tag=True):
    name: str
    ids: list[bytes]


class _Done(Struct, frozen=True, array_like=True, tag=True):
    texts: list[str | None] = []
    data: list[bytes] = []
    num_values: int = 0


class _Fault(Struct, frozen=True, array_like=True, tag=True):
    words: str
    param: str | None
    is_ours: bool = False


_Work: TypeAlias = _Size | _Mend | _Body | _Input | _Chat | _Prompts | _Tokenize | _Decode
_Answer: TypeAlias = _Done | _Fault
_to_json = msgspec.json.encode
BODIES: dict[str, type[Struct]] = {  # of all routes, by name
    kind.__name__: kind
    for kind in (
        ChatRequest,
        CompletionRequest,
        CountTokensRequest,
        DetokenizeRequest,
        DrainRequest,
        MessagesRequest,
        ResponsesRequest,
        TokenizeRequest,
    )
}


class _Message(ChatMessage, frozen=True, forbid_unknown_fields=True):
    """A message of another API may have more calls than one of a chat."""

    tool_calls: list[ToolCall] | None = None


class _Conversation(ChatRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """And its conversation may become more messages."""

    messages: list[_Message]  # pyright: ignore[reportIncompatibleVariableOverride]


class _Key(NamedTuple):
    model: str


@dataclass(frozen=True, slots=True)
class _ServedModel:
    """The parts of a NodeGroup that prompts are made with, in the process."""

    key: _Key
    card: ModelCard
    template: ChatTemplate | None
    tokenizer: TextTokenizer
    context_len: int


class _Process(SideProcess[_Answer]):
    """A process with the models that it has been sent."""

    def __init__(self) -> None:
        super().__init__(__name__, msgspec.msgpack.Decoder(_Done | _Fault))
        self._loaded: set[str] = set()

    def do(self, model: _Model | None, work: _Work) -> _Done:
        """Return the result of a piece of work. Raises RequestError for a body at fault."""
        try:
            if model is not None and model.name not in self._loaded and len(self._loaded) >= MAX_MODELS:
                self.end()
            if self.start():
                self._loaded.clear()
            if model is not None and model.name not in self._loaded:
                self.ask(model)
                self._loaded.add(model.name)
            answer = self.ask(work)
        except (OSError, TimeoutError):
            if self.end() == -signal.SIGPROF:
                raise RequestError(f"the body takes more than {MAX_CPU_S:g} s to read; send less") from None
            raise Unavailable("the process that reads large bodies has ended; send the request again") from None
        if isinstance(answer, _Done):
            return answer
        if answer.is_ours:
            raise BatonError(f"the process that reads large bodies failed: {answer.words}")
        raise RequestError(answer.words, param=answer.param)


class SideWork:
    """The processes of one router. Its methods do what the functions of their names do, for bodies of any size."""

    def __init__(self) -> None:
        self._turns = FairTurns("large bodies", NUM_PROCESSES, MAX_WAITING)
        self._all = [_Process() for _ in range(NUM_PROCESSES)]
        self._free = list(self._all)

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.close()
        self._turns.close(self._join)

    async def exact_size(self, body: bytes, most_plain: int) -> BodySize:
        return BodySize(len(body), (await self._do(None, _Size(body, most_plain))).num_values)

    async def mended(self, body: bytes, kind: Any) -> bytes:
        if BODY_SIZE.get().is_small:
            return mend(body, kind)
        return (await self._do(None, _Mend(body, kind.__name__))).data[0]

    async def body_of_ids(self, body: bytes, kind: type[_T]) -> _T:
        """Return a body of completions or of /detokenize, decoded. Its ids are columns."""
        done = await self._do(None, _Body(body, kind.__name__))
        ids = map(ids_column, done.data[1:])
        prompts = [next(ids) if text is None else text for text in done.texts]
        value: Any = decoder_of(kind).decode(done.data[0])
        given = {"prompt": prompts} if isinstance(value, CompletionRequest) else {"tokens": prompts[0]}
        return cast("_T", msgspec.structs.replace(value, **given))

    async def messages_of(self, body: ResponsesRequest) -> list[ChatMessage]:
        """Return the messages of a body of /v1/responses."""
        if BODY_SIZE.get().is_small:
            return messages_of(body)
        least = ResponsesRequest(model=body.model, input=body.input, instructions=body.instructions)
        return list[ChatMessage](_read_messages((await self._do(None, partial(_input_work, least))).data[0]))

    async def chat_prompt(
        self, body: ChatRequest, group: NodeGroup, tokenizer: TextTokenizer, tools: list[dict[str, Any]] | None = None
    ) -> ChatPrompt:
        if BODY_SIZE.get().is_small:
            return await chat_prompt(body, group, tokenizer, tools)
        model = _model_of(group, tokenizer)
        done = await self._do(model, partial(_chat_work, model.name, group.context_len, body, tools))
        return ChatPrompt(done.texts[0] or "", ids_column(done.data[0]))

    async def encoded_prompts(
        self,
        prompts: Sequence[Prompt],
        group: NodeGroup,
        tokenizer: TextTokenizer,
        *,
        add_special_tokens: bool,
        num_kept: int | None,
        is_scored_alone: bool = False,
    ) -> list[EncodedPrompt]:
        """Return the prompts of a body of /v1/completions as token ids."""
        if BODY_SIZE.get().is_small:
            encode = partial(
                encoded_prompt,
                add_special_tokens=add_special_tokens,
                num_kept=num_kept,
                is_scored_alone=is_scored_alone,
            )
            return [await encode(prompt, group, tokenizer, "prompt") for prompt in prompts]
        model = _model_of(group, tokenizer)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        ids = [pack_ids(prompt) for prompt in prompts if not isinstance(prompt, str)]
        work = _Prompts(model.name, group.context_len, texts, ids, add_special_tokens, num_kept, is_scored_alone)
        done = await self._do(model, work)
        return list(map(EncodedPrompt, map(ids_column, done.data), done.texts))

    async def tokenized(self, body: TokenizeRequest, group: NodeGroup, tokenizer: TextTokenizer) -> bytes:
        """Return the answer of /tokenize as JSON."""
        if BODY_SIZE.get().is_small:
            return _to_json(await tokenized(body, group, tokenizer))
        model = _model_of(group, tokenizer)
        return (await self._do(model, _Tokenize(model.name, group.context_len, _to_json(body)))).data[0]

    async def decoded(self, prompts: Sequence[Sequence[int]], group: NodeGroup, tokenizer: TextTokenizer) -> list[str]:
        """Return the text of each list of ids. Raises RequestError for an id outside the vocabulary."""
        if BODY_SIZE.get().is_small:
            return [_decoded(ids, group) for ids in prompts]
        model = _model_of(group, tokenizer)
        done = await self._do(model, _Decode(model.name, [pack_ids(ids) for ids in prompts]))
        return [text or "" for text in done.texts]

    def _join(self) -> None:
        for process in self._all:
            process.join()

    async def _do(self, model: _Model | None, work: _Work | partial[_Work]) -> _Done:
        """Do a piece of work, or that which a function returns, in a free process."""

        def run() -> _Done:
            process = self._free.pop()
            try:
                return process.do(model, work() if isinstance(work, partial) else work)
            finally:
                self._free.append(process)

        return await self._turns.run(run)


def _model_of(group: NodeGroup, tokenizer: TextTokenizer) -> _Model:
    template = xxhash.xxh3_64_hexdigest((group.card.chat_template or "").encode())
    name = f"{group.key.model}:{group.key.tokenizer}:{template}"
    return _Model(name, group.key.model, group.card, tokenizer.data)


def _input_work(body: ResponsesRequest) -> _Input:
    return _Input(_to_json({"model": body.model, "input": body.input, "instructions": body.instructions}))


def _chat_work(name: str, context_len: int, body: ChatRequest, tools: list[dict[str, Any]] | None) -> _Chat:
    """Return the work on a chat's prompt. Its grammars, which make no part of the prompt, are left out."""
    plain = msgspec.structs.replace(body, response_format=None, structured_outputs=None, tools=None)
    return _Chat(name, context_len, _to_json(plain), _to_json(tools))


_read_messages = msgspec.json.Decoder(list[_Message]).decode
_read_work = msgspec.msgpack.Decoder(_Model | _Work).decode


def main() -> None:
    """Answer the router until it closes the input."""
    models: dict[str, _Model] = {}
    served: dict[str, _ServedModel] = {}

    def answer(data: bytes) -> _Answer:
        work = _read_work(data)
        if isinstance(work, _Model):
            models[work.name] = work
            return _Done()
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # its signal ends the process
        try:
            return asyncio.run(_result(work, partial(_served, models, served)))
        except RequestError as error:
            return _Fault(str(error), error.param)
        except Exception as error:
            return _Fault(repr(error), None, is_ours=True)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    serve(answer)


def _served(models: dict[str, _Model], served: dict[str, _ServedModel], name: str, context_len: int) -> NodeGroup:
    if name not in served:
        model = models.pop(name)
        tokenizer, template = TextTokenizer(model.tokenizer), ChatTemplate.of(model.card)
        served[name] = _ServedModel(_Key(model.model), model.card, template, tokenizer, context_len)
    if served[name].context_len != context_len:
        model = served[name]
        served[name] = _ServedModel(model.key, model.card, model.template, model.tokenizer, context_len)
    return cast(NodeGroup, served[name])


async def _result(work: _Work, served: Any) -> _Done:
    match work:
        case _Size():
            return _Done(num_values=exact_size(work.body, work.most_plain).num_values)
        case _Mend():
            return _Done(data=[mend(work.body, BODIES[work.kind])])
        case _Body():
            return _without_ids(work.body, BODIES[work.kind])
        case _Input():
            return _Done(data=[_to_json(messages_of(msgspec.json.decode(work.body, type=ResponsesRequest)))])
        case _Chat():
            group: NodeGroup = served(work.name, work.context_len)
            body = decoder_of(_Conversation).decode(work.body)
            prompt = await chat_prompt(body, group, _tokenizer_of(group), msgspec.json.decode(work.tools))
            return _Done(texts=[prompt.text], data=[pack_ids(prompt.ids)])
        case _Prompts():
            group = served(work.name, work.context_len)
            encode = partial(
                encoded_prompt,
                add_special_tokens=work.add_special_tokens,
                num_kept=work.num_kept,
                is_scored_alone=work.is_scored_alone,
            )
            ids = map(unpack_ids, work.ids)
            prompts = [next(ids) if text is None else text for text in work.texts]
            encoded = [await encode(prompt, group, _tokenizer_of(group), "prompt") for prompt in prompts]
            return _Done(texts=[each.text for each in encoded], data=[pack_ids(each.ids) for each in encoded])
        case _Tokenize():
            group = served(work.name, work.context_len)
            request = decoder_of(TokenizeRequest).decode(work.body)
            return _Done(data=[_to_json(await tokenized(request, group, _tokenizer_of(group)))])
        case _Decode():
            group = served(work.name, 0)
            return _Done(texts=[_decoded(unpack_ids(ids), group) for ids in work.ids])


def _decoded(ids: Sequence[int], group: NodeGroup) -> str:
    check_vocabulary(ids, group, "tokens")
    return _tokenizer_of(group).decode(ids)


def _without_ids(body: bytes, kind: type[Struct]) -> _Done:
    """Return a body in which one id stands for all ids of its prompts, and then the prompts."""
    value: Any = decoded_strictly(body, kind)
    if value is None:
        body = mend(body, kind)
        value = decoded_mended(body, kind)
    is_completion = isinstance(value, CompletionRequest)
    prompts = prompts_of(value) if is_completion else [value.tokens]
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["prompt" if is_completion else "tokens"] = msgspec.Raw(b"[0]")
    ids = [pack_ids(prompt) for prompt in prompts if not isinstance(prompt, str)]
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    return _Done(texts=texts, data=[_to_json(fields), *ids])


def _tokenizer_of(group: NodeGroup) -> TextTokenizer:
    assert group.tokenizer is not None, "the process has it"
    return group.tokenizer


if __name__ == "__main__":
    main()
