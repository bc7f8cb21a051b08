"""From a message to a frame: MessagePack, and a checksum at its end."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from xxhash import xxh3_64_digest

from ..errors import ProtocolError

_CHECKSUM_BYTES = 8
_MalformedFrame = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_T = TypeVar("_T")


def seal(body: bytes) -> bytes:
    """The bytes, and then the xxh3_64 of them. TCP's 16 bits of checksum let a damaged segment through now and then,
    and a flipped bit in a column of token ids leaves a message that is as good as any."""
    return body + xxh3_64_digest(body)


def unseal(frame: bytes) -> bytes | None:
    """The inverse of `seal`; None where bytes and checksum do not fit."""
    body, checksum = frame[:-_CHECKSUM_BYTES], frame[-_CHECKSUM_BYTES:]
    return body if xxh3_64_digest(body) == checksum else None


def decode_frame(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    """The message in one frame (messages.encode). Raises ProtocolError, and nothing else, whatever the bytes are."""
    body = unseal(frame)
    if body is None:
        raise ProtocolError(f"{len(frame)} bytes do not fit their checksum: damaged, or of another protocol")
    try:
        return decoder.decode(body)
    except _MalformedFrame as error:
        raise ProtocolError(f"{type(error).__name__}: {str(error)[:200]}") from None
