"""Frames: one message as bytes on the wire. A frame is the message in MessagePack, followed by a checksum.

`encode` writes a frame for a peer of any protocol version, and `decode_frame` reads one. protocol.py has the versions.

A Hello is the one message that is read leniently (`decode_to_router`). The router ignores unknown fields of a Hello, so
it can welcome a newer node in a protocol that both know. If there is no such protocol, or if the router still cannot
read the Hello, it refuses the node with a reason in words.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo
from xxhash import xxh3_64_digest

from ..errors import ProtocolError
from . import protocol as protocols
from .membership import Hello
from .messages import ToRouter, to_router_decoder
from .protocol import Message, fields_since, sinces
from .request import Digest, Index, Name

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


class HelloRefused(ProtocolError):
    """The node with routing id `peer` has said Hello and must be refused, for `reason`."""

    def __init__(self, peer: bytes, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer
        self.reason = reason


class _Outline(Struct, frozen=True, tag="hello"):
    """The fields that a Hello of every protocol has."""

    node_id: Name
    epoch: Digest
    protocol_min: Index
    protocol_max: Index


_outline_decoder = msgspec.msgpack.Decoder(_Outline)


def decode_to_router(frame: bytes) -> ToRouter:
    """Return the message in one frame. Raises ProtocolError, and HelloRefused if the node must be told why."""
    try:
        return decode_frame(to_router_decoder, frame)
    except ProtocolError as error:
        return _newer(frame, error)


def apart(theirs: tuple[int, int]) -> str:
    """Return in words that this router and a node with this range of protocols have none in common."""
    ours = f"{protocols.PROTOCOL_MIN}..{protocols.PROTOCOL_MAX}"
    return f"protocol versions {theirs[0]}..{theirs[1]} of the node, {ours} of the router"


def _newer(frame: bytes, error: ProtocolError) -> Hello:
    """Return the Hello of a newer node without its unknown fields. Raises `error` if the frame is not a Hello."""
    try:
        outline = decode_frame(_outline_decoder, frame)
    except ProtocolError:
        raise error from None
    peer = f"{outline.node_id}:{outline.epoch}".encode()  # if it is too long for a routing id, no peer has it
    theirs = (outline.protocol_min, outline.protocol_max)
    if protocols.agreed(theirs) is None:
        raise HelloRefused(peer, apart(theirs))
    if outline.protocol_max <= protocols.PROTOCOL_MAX:
        raise error
    try:
        return _strict_decoder.decode(_encode(decode_frame(_lenient_decoder(), frame)))
    except (ProtocolError, msgspec.MsgspecError) as why:
        raise HelloRefused(peer, f"{apart(theirs)}: its Hello cannot be read ({str(why)[:200]})") from None


_strict_decoder = msgspec.msgpack.Decoder(Hello)


@cache
def _lenient_decoder() -> msgspec.msgpack.Decoder[Struct]:
    return msgspec.msgpack.Decoder(_lenient(Hello))


@cache
def _lenient(kind: type[Struct]) -> type[Struct]:
    """Return a copy of the struct type that ignores unknown fields and has the same bounds."""
    hints = get_type_hints(kind, include_extras=True)
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        fields.append((field.encode_name, _lenient_hint(hints[field.name]), *_default(field)))
    config = kind.__struct_config__
    return msgspec.defstruct(f"Lenient{kind.__name__}", fields, tag=config.tag, array_like=config.array_like)


def _default(field: FieldInfo) -> list[Any]:
    if field.default_factory is not msgspec.NODEFAULT:
        return [msgspec.field(default_factory=cast("Callable[[], Any]", field.default_factory))]
    return [] if field.required else [field.default]


def _lenient_hint(hint: Any) -> Any:
    """Return an annotation in which every struct is replaced by its lenient copy."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return _lenient(hint)
    origin: Any = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        return Annotated[(_lenient_hint(args[0]), *args[1:])]
    if origin in (Union, types.UnionType):
        return Union[tuple(_lenient_hint(arg) for arg in args)]  # noqa: UP007 - made of what is known only now
    if origin in (tuple, dict):
        return types.GenericAlias(origin, tuple(_lenient_hint(arg) for arg in args))
    return cast(Any, hint)
