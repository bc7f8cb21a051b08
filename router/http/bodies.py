"""Bodies of HTTP requests: received within bounds of size and time, unpacked, and decoded strictly."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

import msgspec
from aiohttp import HttpVersion11, hdrs, web

from ...metadata.errors import Overloaded
from .connection import INTERIM, reason_of
from .encodings import decoded, encoding_of
from .errors import HttpRefusal, from_malformed, from_validation
from .refused_bodies import mended

logger = logging.getLogger(__name__)

BODY_S = 30.0  # a body must have arrived within so many seconds
MAX_BODIES = 32  # of the largest size, or more of smaller sizes, that are received at the same time

_T = TypeVar("_T")


class Bodies:
    """Reader of all bodies of one router. It bounds the bytes that are being received at the same time."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._num_bytes = 0  # of bodies that are being received

    async def read(self, http_request: web.Request) -> bytes:
        """Return the body, without its Content-Encoding.

        Raises HttpRefusal (413, 415, 408, 400) for a body that is too large, encoded otherwise, late or broken, and
        Overloaded if too many bodies are being received.
        """
        limit = self._max_body_bytes
        if (http_request.content_length or 0) > limit:
            raise web.HTTPRequestEntityTooLarge(limit, http_request.content_length or 0)
        encoding = encoding_of(http_request.headers.getall("Content-Encoding", ()))
        return decoded(await self._receive(http_request), encoding, limit)

    async def _receive(self, http_request: web.Request) -> bytes:
        size = self._max_body_bytes if http_request.content_length is None else http_request.content_length
        if self._num_bytes + size > MAX_BODIES * self._max_body_bytes:
            raise Overloaded("too many bodies are being received")
        self._num_bytes += size
        try:
            async with asyncio.timeout(BODY_S):
                await _invite(http_request)
                return await http_request.read()
        except TimeoutError:
            raise HttpRefusal(408, f"the body did not arrive within {BODY_S:g} s") from None
        except web.RequestPayloadError as error:
            logger.info("a body cannot be read: %s", reason_of(error))
            raise HttpRefusal(400, "the body cannot be read: it is not what its headers say") from None
        finally:
            self._num_bytes -= size


async def expected(http_request: web.Request) -> None:
    """Handler of aiohttp for the header Expect. It does nothing: a body is invited when it is read, after the checks of
    access and size, and expectations that nobody knows are ignored (RFC 9110, 10.1.1)."""


async def _invite(http_request: web.Request) -> None:
    """Tell a client that waits before it sends its body (`Expect: 100-continue`) to send it."""
    if http_request.version == HttpVersion11 and http_request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        await http_request.writer.write(INTERIM)
        http_request.writer.output_size = 0  # the answer itself has not begun


def decoded_strictly(data: bytes, decoder: msgspec.json.Decoder[_T]) -> _T | None:
    """Return the decoded body, None if it is not of its type: then `mended` may leave something out, or say more.

    Raises RequestError for a body that is no JSON.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise from_malformed(data, error) from None


def decoded_mended(data: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Return the decoded body, after `mended`. Raises RequestError that names the field at fault."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None


def decode(data: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Return the decoded body, without unknown fields that are null. Raises RequestError that names the field at
    fault."""
    value = decoded_strictly(data, decoder)
    return decoded_mended(mended(data, decoder.type), decoder) if value is None else value
