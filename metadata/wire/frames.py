"""Frames: one message as bytes on the wire. A frame is the message in MessagePack, followed by a checksum.

`encode` writes a frame for a peer of any protocol version, and `decode_frame` reads one. protocol.py has the versions.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_digest

from ..errors import ProtocolError
from . import protocol as protocols
from .protocol import Message, fields_since, sinces

_CHECKSUM_BYTES = 8
_MalformedFrame = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_T = TypeVar("_T")

_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message, protocol: int | None = None) -> bytes:
    """Return the message as a frame for a peer that is addressed in `protocol` (None: the newest). Fields that the peer
    does not know are left out."""
    if protocol is None or protocol >= protocols.PROTOCOL_MAX:
        return seal(_encode(message))
    assert message.since <= protocol, (type(message).__name__, message.since, protocol)
    return seal(_encode(_older(message, protocol)))


def seal(body: bytes) -> bytes:
    """Return the bytes followed by their xxh3_64. TCP has a checksum of 16 bits only, so a damaged segment sometimes
    passes; and a flipped bit in a column of token ids would leave a valid message."""
    return body + xxh3_64_digest(body)


def unseal(frame: bytes) -> bytes | None:
    """Return the bytes without their checksum; None if the checksum is wrong."""
    body, checksum = frame[:-_CHECKSUM_BYTES], frame[-_CHECKSUM_BYTES:]
    return body if xxh3_64_digest(body) == checksum else None


def decode_frame(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    """Return the message in one frame. Raises ProtocolError, and nothing else, for any bytes."""
    body = unseal(frame)
    if body is None:
        raise ProtocolError(
            f"{len(frame)} bytes do not fit their checksum: they are damaged, or not from a Baton process"
        )
    try:
        return decoder.decode(body)
    except _MalformedFrame as error:
        raise ProtocolError(f"{type(error).__name__}: {str(error)[:200]}") from None


def _older(value: Any, protocol: int) -> Any:
    """Return the value without fields that came after the protocol, in plain containers if any is left out."""
    if isinstance(value, Struct):
        kind = type(value)
        if not any(since > protocol for since in sinces(kind)):
            return value
        own = fields_since(kind)
        names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        fields = {
            on_wire: _older(getattr(value, name), protocol) for name, on_wire in names if own.get(name, 0) <= protocol
        }
        config = kind.__struct_config__
        if config.array_like:
            return list(fields.values())
        return fields if config.tag is None else {config.tag_field: config.tag, **fields}
    if isinstance(value, tuple):
        return [_older(item, protocol) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, dict):
        return {key: _older(item, protocol) for key, item in cast("dict[Any, Any]", value).items()}
    return value
