"""The bytes of every message of a protocol, kept for a test (tests/metadata/wire/test_messages.py).

`PYTHONPATH=tests/support/fuzz python tests/support/fuzz/golden.py FILE`, with FILE as
tests/metadata/wire/golden/protocol_N.json, writes the bytes of the newest protocol with the present code. Run it once
per protocol, when the protocol is complete.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from baton.metadata.cache.names import NAME_BYTES
from baton.metadata.wire import data_link
from baton.metadata.wire import messages as m
from baton.metadata.wire.frames import encode
from baton.metadata.wire.request import pack_ids

DIRECTIONS = {
    "ToRouter": m.ToRouter,
    "ToNode": m.ToNode,
    "ToPrefill": data_link.ToPrefill,
    "ToDecode": data_link.ToDecode,
}
DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "ToRouter": m.to_router_decoder,
    "ToNode": m.to_node_decoder,
    "ToPrefill": data_link.to_prefill_decoder,
    "ToDecode": data_link.to_decode_decoder,
}


def full(kind: type) -> Any:
    """Return a message with a distinct value in every field."""
    return _full(inspect.type_info(kind), itertools.count(1))


def bare(kind: type) -> Any:
    """Return a message with only the required fields, and None wherever that is allowed."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    optional = {field.name for field in info.fields if not field.required}
    none = {field.name: None for field in info.fields if _may_be_none(field.type)}
    given = msgspec.structs.asdict(full(kind)) | none
    return kind(**{name: value for name, value in given.items() if name not in optional})


def newest() -> list[dict[str, Any]]:
    """Return direction, type, readable contents and frame of each message of the newest protocol."""
    return [
        {"direction": direction, "kind": kind.__name__, "says": _readable(message), "frame": encode(message).hex()}
        for direction, union in DIRECTIONS.items()
        for kind in get_args(union)
        for message in {repr(each): each for each in (full(kind), bare(kind))}.values()
    ]


def _readable(message: Any) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(message))


def _may_be_none(info: Any) -> bool:
    return isinstance(info, inspect.UnionType) and info.includes_none


def _full(info: Any, numbers: Iterator[int]) -> Any:
    match info:
        case inspect.StructType():
            fields = {field.name: _full(field.type, numbers) for field in info.fields}
            return info.cls(**fields | _fitting(info.cls, fields))
        case inspect.UnionType():
            return _full(next(each for each in info.types if not isinstance(each, inspect.NoneType)), numbers)
        case inspect.IntType():
            low = info.ge if info.ge is not None else 0
            high = info.le if info.le is not None else (info.lt or 2**62) - 1
            return low + next(numbers) % (high - low + 1)
        case inspect.FloatType():
            low, high = info.ge if info.ge is not None else info.gt or 0.0, info.le if info.le is not None else 1e4
            return low + (high - low) * (next(numbers) % 97 + 1) / 128
        case inspect.StrType(pattern=str()):  # the name of an inbox, the only text with a form
            return f"baton-{next(numbers):032x}"
        case inspect.StrType():
            return f"text-{next(numbers)}"
        case inspect.BytesType():
            length = max(info.min_length or 0, 8)
            return bytes((next(numbers) + place) % 256 for place in range(length))
        case inspect.BoolType():
            return True
        case inspect.LiteralType():
            return info.values[next(numbers) % len(info.values)]
        case inspect.VarTupleType():
            return tuple(_full(info.item_type, numbers) for _ in range(max(info.min_length or 0, 2)))
        case inspect.DictType():
            return {_full(info.key_type, numbers): _full(info.value_type, numbers) for _ in range(2)}
        case _:
            raise AssertionError(f"a message field of a kind this does not know: {info}")


def _fitting(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that must change so that the fields of the message fit together."""
    if kind is m.Tokens:
        return {"firsts": pack_ids([3, 4]), "counts": pack_ids([1, 2]), "ids": pack_ids([7, 8, 9])}
    if kind is m.CachedPages:
        return {name: NAME_BYTES * fields[name] for name in ("stored", "removed")}
    return {}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(newest(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
