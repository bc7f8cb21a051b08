"""Bodies of HTTP requests: received within bounds of size and time, unpacked, counted, and decoded strictly.

Received   into room that all callers share (BodyRoom). Only bytes that have come count, and the first SMALL_BODY bytes
           of each body do not: so there is always room for small bodies. One caller alone may take all the room. When
           it is full, the caller that holds most gives way.
Unpacked   from gzip, bounded by the limit of all bodies. aiohttp itself decodes nothing.
Counted    on the bytes (BodySize). A small number of bytes can hold many values, and each costs time when it is
           decoded, checked and rendered. So bodies with very many values are refused before anything is made of them.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import HttpVersion11, hdrs, web
from msgspec import inspect

from ....metadata.errors import BatonError, Overloaded, RequestError
from ....metadata.wire.request import MAX_CONTEXT
from ...tenants.fair_turns import ASKER, FairTurns
from ..server.connection import INTERIM, reason_of
from ..server.errors import HttpRefusal, from_malformed, from_validation
from .fields import check_served, decoder_of
from .refused_bodies import mended

logger = logging.getLogger(__name__)

BODY_S = 30.0  # a body must have arrived within so many seconds
GRACE_S = 10.0  # the first seconds of a body may be slow
LEAST_RATE = 16 << 10  # bytes per second after them
MAX_BODIES = 32  # of the largest size, or more of smaller sizes, that are received at the same time
MAX_COMPRESSED = 64  # bodies of one caller that wait to be unpacked

_T = TypeVar("_T", bound=msgspec.Struct)


class Bodies:
    """Reader of all bodies of one router. It bounds the bytes that are being received at the same time."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._room = BodyRoom(MAX_BODIES * max_body_bytes)
        self._unpacking = FairTurns("compressed bodies", 1, MAX_COMPRESSED)

    async def read(self, http_request: web.Request) -> bytes:
        """Return the body, without its Content-Encoding.

        Raises HttpRefusal (413, 415, 408, 400) for a body that is too large, encoded otherwise, late, slow or broken,
        and Overloaded if too many bodies are being received.
        """
        limit = self._max_body_bytes
        if (http_request.content_length or 0) > limit:
            raise web.HTTPRequestEntityTooLarge(limit, http_request.content_length or 0)
        encoding = encoding_of(http_request.headers.getall("Content-Encoding", ()))
        data = await self._receive(http_request)
        if encoding is None:
            return data
        return await self._unpacking.run(partial(decoded, data, encoding, limit))

    def close(self) -> None:
        """End the thread that unpacks bodies."""
        self._unpacking.close(lambda: None)

    async def _receive(self, http_request: web.Request) -> bytes:
        content = http_request.content
        if content.is_eof() and content.exception() is None:  # all of it has come with the head
            return content.read_nowait()
        loop, parts = asyncio.get_running_loop(), list[bytes]()
        begun = loop.time()
        allowed_s = min(GRACE_S, BODY_S)
        deadline = asyncio.timeout_at(begun + allowed_s)
        body = ReceivedBody(ASKER.get(), lambda: deadline.reschedule(loop.time()))
        try:
            async with deadline:
                await _invite(http_request)
                while part := await content.readany():
                    parts.append(part)
                    self._room.add(body, len(part))
                    if body.num_bytes > self._max_body_bytes:
                        raise web.HTTPRequestEntityTooLarge(self._max_body_bytes, body.num_bytes)
                    if content.at_eof():
                        break
                    allowed_s = min(GRACE_S + body.num_bytes / LEAST_RATE, BODY_S)
                    deadline.reschedule(begun + allowed_s)
        except TimeoutError:
            raise self._late(body, allowed_s) from None
        except web.RequestPayloadError as error:
            logger.info("a body cannot be read: %s", reason_of(error))
            raise HttpRefusal(400, "the body cannot be read: it is not what its headers say") from None
        finally:
            self._room.remove(body)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @staticmethod
    def _late(body: ReceivedBody, allowed_s: float) -> BatonError:
        if body.is_displaced:
            return Overloaded("too many bodies are being received")
        if allowed_s == BODY_S:
            return HttpRefusal(408, f"the body did not arrive within {BODY_S:g} s")
        return HttpRefusal(
            408,
            f"only {body.num_bytes} bytes of the body arrived in {allowed_s:.0f} s; after {GRACE_S:g} s it must come "
            f"at {LEAST_RATE} bytes per second or faster",
        )


async def expected(http_request: web.Request) -> None:
    """Handler of aiohttp for the header Expect. It does nothing: a body is invited when it is read, after the checks of
    access and size, and expectations that nobody knows are ignored (RFC 9110, 10.1.1)."""


async def _invite(http_request: web.Request) -> None:
    """Tell a client that waits before it sends its body (`Expect: 100-continue`) to send it."""
    if http_request.version == HttpVersion11 and http_request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        await http_request.writer.write(INTERIM)
        http_request.writer.output_size = 0  # the answer itself has not begun


def decoded_strictly(data: bytes, kind: type[_T]) -> _T | None:
    """Return the decoded body, None if it is not of its type: then `mended` may leave something out, or say more.

    Raises RequestError for a body that is no JSON.
    """
    try:
        return decoder_of(kind).decode(data)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise from_malformed(data, error) from None


def mend(data: bytes, kind: Any) -> bytes:
    """Do the work of `mended`. Raises RequestError also for a body that is no JSON."""
    try:
        return mended(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise from_malformed(data, error) from None


def decoded_mended(data: bytes, kind: type[_T]) -> _T:
    """Return the decoded body, after `mend`. Raises RequestError that names the field at fault."""
    try:
        return decoder_of(kind).decode(data)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise from_malformed(data, error) from None


def decode(data: bytes, kind: type[_T]) -> _T:
    """Return the decoded body, without unknown fields that are null. Raises RequestError that names a field that is
    wrong or not served."""
    value = decoded_strictly(data, kind)
    if value is None:
        value = decoded_mended(mend(data, kind), kind)
    check_served(value)
    return value


GZIP = "gzip"
MAX_MEMBERS = 16  # of one body; an empty member costs its sender only 20 bytes

_GZIP_NAMES = (GZIP, "x-gzip")
_GZIP_FORMAT = 16 + zlib.MAX_WBITS


def encoding_of(values: Iterable[str]) -> str | None:
    """Return the encoding that the Content-Encoding headers name, None for an unencoded body.

    Raises HttpRefusal (415) for an unknown encoding, and for several encodings.
    """
    given = ", ".join(values).strip()
    name = given.lower()
    if name in ("", "identity"):
        return None
    if name not in _GZIP_NAMES:
        words = f"a body with Content-Encoding {given!r} is not served; send it with {GZIP}, or as it is"
        raise HttpRefusal(415, words, {"Accept-Encoding": GZIP})
    return GZIP


def decoded(data: bytes, encoding: str | None, limit: int) -> bytes:
    """Return the body without its encoding. No more than `limit` + 1 bytes are unpacked.

    A gzip stream may have several members, whose contents follow each other (RFC 1952). Raises HttpRefusal (413) for
    more than the limit, RequestError for a stream that is broken, cut, or followed by other bytes.
    """
    if encoding is None:
        return data
    parts: list[bytes] = []
    left = limit + 1
    for _ in range(MAX_MEMBERS):
        member = zlib.decompressobj(_GZIP_FORMAT)
        try:
            part = member.decompress(data, left)
        except zlib.error:
            raise RequestError("the body is not the gzip stream that its Content-Encoding says") from None
        parts.append(part)
        left -= len(part)
        if left == 0:
            raise too_large(limit)
        if not member.eof:
            raise RequestError("the body is a gzip stream that ends too early")
        data = member.unused_data
        if not data:
            return b"".join(parts)
    raise RequestError(f"the body is a gzip stream of more than {MAX_MEMBERS} members; send one")


def too_large(limit: int) -> HttpRefusal:
    """Return the refusal of a body of more than `limit` bytes."""
    return HttpRefusal(413, f"the body is larger than {limit} bytes; send less, or raise the router's --max-body-bytes")


SMALL_BODY = 64 << 10


class ReceivedBody:
    """One body that is being received. `give_way` is called once if its room is needed for another caller."""

    __slots__ = ("give_way", "is_displaced", "num_bytes", "share")

    def __init__(self, share: Hashable, give_way: Callable[[], None]) -> None:
        self.share = share
        self.give_way = give_way
        self.num_bytes = 0
        self.is_displaced = False

    @property
    def num_counted(self) -> int:
        return max(0, self.num_bytes - SMALL_BODY)


class BodyRoom:
    """Room for `num_bytes` of bodies that are being received."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_taken = 0
        self._bodies: dict[Hashable, set[ReceivedBody]] = {}

    def add(self, body: ReceivedBody, num_bytes: int) -> None:
        """Count bytes of a body that have come. Raises Overloaded if the room is full and no other caller has more, or
        if the body has given way."""
        if body.is_displaced:
            raise Overloaded("too many bodies are being received")
        before = body.num_counted
        body.num_bytes += num_bytes
        self._bodies.setdefault(body.share, set()).add(body)
        self._num_taken += body.num_counted - before
        while self._num_taken > self._num_bytes:
            most = max(self._bodies, key=self._taken_by)
            if most == body.share or self._taken_by(most) <= self._taken_by(body.share):
                raise Overloaded("too many bodies are being received")
            largest = max(self._bodies[most], key=lambda each: each.num_bytes)
            self.remove(largest)
            largest.is_displaced = True
            largest.give_way()

    def remove(self, body: ReceivedBody) -> None:
        """Free the room of a body. A second call does nothing."""
        bodies = self._bodies.get(body.share, set())
        if body in bodies:
            self._num_taken -= body.num_counted
            bodies.remove(body)
            if not bodies:
                del self._bodies[body.share]

    def _taken_by(self, share: Hashable) -> int:
        return sum(body.num_counted for body in self._bodies[share])


MAX_VALUES = 1 << 17  # texts, names of fields, lists and objects; 4,096 messages with a call each have about 80,000
MAX_PLAIN = 2 * MAX_VALUES  # commas, and so numbers and the like
MAX_IDS = MAX_CONTEXT + MAX_VALUES  # commas of a body whose type has a list of token ids without a lower bound
SMALL_VALUES = 1 << 12
SMALL_BYTES = 256 << 10


class BodySize(NamedTuple):
    """Bytes of a body, and a bound on the number of its texts, names, lists and objects."""

    num_bytes: int
    num_values: int

    @property
    def is_small(self) -> bool:
        """Whether the event loop itself may turn the body into a prompt."""
        return self.num_values <= SMALL_VALUES and self.num_bytes <= SMALL_BYTES


_NO_BODY = BodySize(0, 0)
BODY_SIZE: ContextVar[BodySize] = ContextVar("body_size", default=_NO_BODY)  # of the HTTP request being served


@cache
def most_plain(kind: Any) -> int:
    """Return how many commas a body of a type may have outside of its texts."""
    return MAX_IDS if takes_ids(kind) else MAX_PLAIN


@cache
def takes_ids(kind: Any) -> bool:
    """Return whether a body of a type may have a prompt's token ids."""
    described = inspect.type_info(kind)
    fields = described.fields if isinstance(described, inspect.StructType) else ()
    return any(_takes_ids(field.type) for field in fields)


def _takes_ids(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(map(_takes_ids, kind.types))
    if not isinstance(kind, inspect.ListType) or (kind.max_length or MAX_CONTEXT) < MAX_CONTEXT:
        return False
    items = kind.item_type.types if isinstance(kind.item_type, inspect.UnionType) else (kind.item_type,)
    return any(isinstance(each, inspect.IntType) for each in items)


def quick_size(data: bytes, most_plain: int) -> BodySize | None:
    """Return the size of a body, None if brackets and quotes in its texts must not be counted, which takes longer."""
    num_values, num_plain = _counts(data)
    return BodySize(len(data), num_values) if num_values <= MAX_VALUES and num_plain <= most_plain else None


def exact_size(data: bytes, most_plain: int) -> BodySize:
    """Return the size of a body. Raises RequestError for one with too many values."""
    num_values, num_plain = _counts(_without_texts(data))
    if num_values > MAX_VALUES:
        raise RequestError(
            f"the body has {num_values} texts, names of fields, lists and objects; at most {MAX_VALUES} are served"
        )
    if num_plain > most_plain:
        raise RequestError(f"the body has {num_plain} values; at most {most_plain} are served")
    return BodySize(len(data), num_values)


def _counts(data: bytes) -> tuple[int, int]:
    """Return the number of texts, lists and objects, and that of commas, as if no text held a quote or bracket."""
    return data.count(b'"') // 2 + data.count(b"[") + data.count(b"{"), data.count(b",")


def _without_texts(data: bytes) -> bytes:
    """Return a body with empty texts. A body with too many texts is returned with its quotes alone."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_quotes = data.count(b'"')
    if num_quotes > 2 * MAX_VALUES:
        return b'"' * num_quotes
    return b'""'.join(data.split(b'"')[::2])
