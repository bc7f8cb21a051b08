"""One streamed request and its times: when it was sent, and when the bytes of each part of the answer were read.

    target = Target("http://127.0.0.1:8000", "llama")
    async with open_session(target) as session:
        reply = await ask(session, target, "Once upon a time", 64)

A time is taken when the event loop reads the bytes, before they are decoded and before the task that waits for them
runs: with many streams, that task runs after the reads of all others.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler

from ..simulation.figures import Record
from ..terminal import printable

Turns = list[dict[str, str]]  # messages of a chat

_DATA = b"data:"
_DONE = b"[DONE]"
_MOST_SAID = 200  # characters of a server's words in an error


@dataclass(frozen=True, slots=True)
class Target:
    """A server with OpenAI's interface, and how it is asked."""

    url: str  # without /v1
    model: str
    is_chat: bool = False
    api_key: str | None = field(default=None, repr=False)
    fields: Mapping[str, Any] = field(default_factory=dict)  # of each body; None leaves out a field that all have

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, prompt: str | list[int] | Turns, num_tokens: int) -> bytes:
        """Return the JSON of a request."""
        name = "messages" if self.is_chat else "prompt"
        body = {"model": self.model, name: prompt, "max_tokens": num_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.fields}
        return msgspec.json.encode({key: value for key, value in body.items() if value is not None})


@dataclass(slots=True)
class Reply:
    """The answer to one request, or its error. It grows while it is read. Times are of `time.perf_counter`."""

    sent_s: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))  # when each event with tokens was read
    end_s: float = 0.0
    rid: str = ""
    text: str = ""
    ids: list[int] = field(default_factory=list)  # if the server sends them (`return_token_ids`)
    id_times: array[float] = field(default_factory=lambda: array("d"))  # when each of them was read
    prompt_len: int | None = None  # tokens, as the server counts them
    num_cached: int = 0  # of them
    num_counted: int | None = None  # tokens of the answer, as the server counts them
    finish_reason: str | None = None
    error: str | None = None  # its kind
    message: str = ""  # the server's words

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer. A server that does not count them is taken to send one per event."""
        return self.num_counted if self.num_counted is not None else len(self.ids) or len(self.times)

    @property
    def record(self) -> Record:
        """The times of an answer with tokens. Those of further tokens are 0 if there is one token."""
        gaps = self.gaps_s or [0.0]
        tpot_s = (self.times[-1] - self.times[0]) / max(1, self.num_tokens - 1)
        return Record(self.times[0] - self.sent_s, tpot_s, gaps[0], max(gaps))

    @property
    def gaps_s(self) -> list[float]:
        """The times between events with tokens."""
        return [self.times[i] - self.times[i - 1] for i in range(1, len(self.times))]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_token(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Connection(ResponseHandler):
    """A connection that notes when it was last read."""

    read_s = 0.0

    def data_received(self, data: bytes) -> None:
        self.read_s = time.perf_counter()
        super().data_received(data)


class _Connector(aiohttp.TCPConnector):
    """Opens connections of this kind, without a limit on their number."""

    def __init__(self) -> None:
        super().__init__(limit=0)
        self._factory = partial(_Connection, loop=self._loop)


def open_session(target: Target, timeout_s: float = 600.0) -> aiohttp.ClientSession:
    """Return a session for any number of requests at once. The caller closes it."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    return aiohttp.ClientSession(
        connector=_Connector(),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        trust_env=False,
    )


async def ask(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: str | list[int] | Turns,
    num_tokens: int,
    reply: Reply | None = None,
) -> Reply:
    """Send one request and read its answer. A failure is named in the reply and raises nothing. `reply`: one that the
    caller watches meanwhile."""
    return await send(session, target, target.body(prompt, num_tokens), Reply() if reply is None else reply)


async def send(session: aiohttp.ClientSession, target: Target, body: bytes, reply: Reply) -> Reply:
    """Send the body of a request, and read its answer into the reply."""
    reply.sent_s = time.perf_counter()
    try:
        async with session.post(target.url + target.path, data=body) as response:
            if response.status != 200:
                _fail(reply, f"HTTP {response.status}", await response.read())
            elif response.content_type != "text/event-stream":
                _fail(reply, "no stream", f"the answer is {response.content_type}, not text/event-stream")
            else:
                await _read(response, reply)
    except aiohttp.ClientConnectorError as error:
        _fail(reply, "no connection", str(error))
    except TimeoutError:
        _fail(reply, "timeout", f"after {time.perf_counter() - reply.sent_s:.0f} s")
    except (aiohttp.ClientError, OSError) as error:
        _fail(reply, "broken connection", str(error) or type(error).__name__)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _fail(reply, "unreadable event", str(error))
    reply.end_s = time.perf_counter()
    return reply


async def _read(response: aiohttp.ClientResponse, reply: Reply) -> None:
    rest, is_done = b"", False
    connection = response.connection.protocol if response.connection is not None else None  # None: it is read already
    async for data in response.content.iter_any():
        now = connection.read_s if isinstance(connection, _Connection) else time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                event = line[len(_DATA) :].strip()
                if event == _DONE:
                    is_done = True
                else:
                    _take(reply, _decode(event), now)
    if reply.error is None and not is_done:
        _fail(reply, "broken stream", "it ended without [DONE]")
    if reply.error is None and not reply.times:
        _fail(reply, "no token", f"the answer ended with {reply.finish_reason}")


def _take(reply: Reply, event: _Event, now: float) -> None:
    if event.error is not None:
        _fail(reply, "error in the stream", msgspec.json.encode(event.error))
    reply.rid = reply.rid or event.id or ""
    for choice in event.choices or ():
        if choice.text or choice.token_ids or choice.delta.has_token:
            reply.times.append(now)
            reply.text += choice.text or choice.delta.content or ""
        if choice.token_ids:
            reply.ids += choice.token_ids
            reply.id_times.extend([now] * len(choice.token_ids))
        reply.finish_reason = choice.finish_reason or reply.finish_reason
    if event.usage is not None:
        details = event.usage.prompt_tokens_details
        reply.prompt_len, reply.num_counted = event.usage.prompt_tokens, event.usage.completion_tokens
        reply.num_cached = (details.cached_tokens or 0) if details is not None else 0


def _fail(reply: Reply, kind: str, words: str | bytes) -> None:
    reply.error, reply.message = kind, _message(words)


def _message(words: str | bytes) -> str:
    """Return the message of an error of OpenAI's form, else the words themselves, in one short line."""
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else words
    try:
        found = msgspec.json.decode(text)
        found = found.get("error", found) if isinstance(found, dict) else found
        text = found.get("message", text) if isinstance(found, dict) else found
    except msgspec.DecodeError:
        pass
    text = printable(" ".join(str(text).split()))
    return text if len(text) <= _MOST_SAID else text[: _MOST_SAID - 3] + "..."
