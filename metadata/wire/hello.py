"""Reading a Hello of a newer protocol. Hello is the one message that is read leniently.

The router ignores unknown fields of a Hello, so it can welcome a newer node in a protocol that both know. If there is
no such protocol, or if the router still cannot read the Hello, it refuses the node with a reason in words.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo

from ..errors import ProtocolError
from . import protocol
from .frames import decode_frame
from .membership import Hello
from .messages import ToRouter, to_router_decoder
from .request import Digest, Index, Name


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


def apart(protocols: tuple[int, int]) -> str:
    """Return in words that this router and a node with this range of protocols have none in common."""
    ours, theirs = f"{protocol.PROTOCOL_MIN}..{protocol.PROTOCOL_MAX}", f"{protocols[0]}..{protocols[1]}"
    return f"protocol versions {theirs} of the node, {ours} of the router"


def _newer(frame: bytes, error: ProtocolError) -> Hello:
    """Return the Hello of a newer node without its unknown fields. Raises `error` if the frame is not a Hello."""
    try:
        outline = decode_frame(_outline_decoder, frame)
    except ProtocolError:
        raise error from None
    peer = f"{outline.node_id}:{outline.epoch}".encode()  # if it is too long for a routing id, no peer has it
    protocols = (outline.protocol_min, outline.protocol_max)
    if protocol.agreed(protocols) is None:
        raise HelloRefused(peer, apart(protocols))
    if outline.protocol_max <= protocol.PROTOCOL_MAX:
        raise error
    try:
        return _strict_decoder.decode(_encode(decode_frame(_lenient_decoder(), frame)))
    except (ProtocolError, msgspec.MsgspecError) as why:
        raise HelloRefused(peer, f"{apart(protocols)}: its Hello cannot be read ({str(why)[:200]})") from None


_strict_decoder = msgspec.msgpack.Decoder(Hello)
_encode = msgspec.msgpack.Encoder().encode


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
