"""Bodies of HTTP requests: received within bounds of size and time, unpacked, and decoded strictly."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, hdrs, web

from ....metadata.errors import BatonError, Overloaded
from ...fair_turns import ASKER, FairTurns
from ..server.connection import INTERIM, reason_of
from ..server.errors import HttpRefusal, from_malformed, from_validation
from .body_room import BodyRoom, ReceivedBody
from .encodings import decoded, encoding_of
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
