"""Request bodies near the size limit: one or more for each place of a body at which a client decides how much there is.

The places are found in the types of the routes, so that a new field is tried without a new line here. A place is a
list, a table, a text, or any JSON value. All other fields of the body are small and valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec import inspect

from baton.router.http.responses.types import INPUT_ITEMS
from baton.router.http.server.routes import ROUTES

_HOLE = "\ue000"  # stands for the place until its value is known
_FIRST = {"model": "fake"}  # values that a served body needs


class LimitBody(NamedTuple):
    """A body for a route. `name` says which place is filled, and with what."""

    route: str
    name: str
    data: bytes


def limit_bodies(size: int, only: str = "") -> Iterator[LimitBody]:
    """Yield bodies of about `size` bytes for all places of all routes that take one, or of the route `only`."""
    for route in ROUTES:
        if route.body is None or only not in ("", route.template):
            continue
        path = route.template.replace("{id}", "p0")
        for place, kind, frame in _places(inspect.type_info(route.body), "", ()):
            head, _, tail = frame.partition(f'"{_HOLE}"')
            room = size - len(head) - len(tail) - 32
            for name, value in _values(kind, room):
                yield LimitBody(path, f"{place} {name}", b"".join((head.encode(), value, tail.encode())))
                if tail.endswith("}"):
                    ending = f'{tail[:-1]}, "unknown_field": 1}}'.encode()
                    yield LimitBody(path, f"{place} {name} + unknown", b"".join((head.encode(), value, ending)))


def _kinds(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _places(kind: inspect.Type, path: str, above: tuple[type, ...]) -> Iterator[tuple[str, inspect.Type, str]]:
    """Yield the path, the type, and a small JSON value with the hole at the place, for all places within a type."""
    for each in _kinds(kind):
        if isinstance(each, inspect.StructType):
            if each.cls in above:
                continue
            least = _least_fields(each)
            for field in each.fields:
                for place, inner, text in _places(
                    field.type, f"{path}.{field.encode_name}".lstrip("."), (*above, each.cls)
                ):
                    fields = {**least, field.encode_name: _HOLE * 2}
                    frame = json.dumps(fields).replace(json.dumps(_HOLE * 2), text)
                    yield place, inner, frame
        elif isinstance(each, inspect.ListType):
            yield path, each, f'"{_HOLE}"'
            if path == "input" and isinstance(each.item_type, inspect.RawType):
                items = [inspect.type_info(item) for item in dict.fromkeys(INPUT_ITEMS.values())]
            else:
                items = [each.item_type]
            for item in items:
                for place, inner, text in _places(item, f"{path}[]", above):
                    yield place, inner, f"[{text}]"
        elif isinstance(each, inspect.DictType | inspect.AnyType | inspect.RawType | inspect.StrType):
            yield path, each, f'"{_HOLE}"'


def _least_fields(kind: inspect.StructType) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if kind.tag_field is not None:
        fields[kind.tag_field] = kind.tag
    for field in kind.fields:
        if field.encode_name in _FIRST:
            fields[field.encode_name] = _FIRST[field.encode_name]
        elif field.required:
            fields[field.encode_name] = _least(field.type)
    return fields


def _least(kind: inspect.Type) -> Any:
    """Return a small valid value of a type."""
    match _kinds(kind)[0]:
        case inspect.StructType() as struct:
            return _least_fields(struct)
        case inspect.ListType() as each:
            return [_least(each.item_type)] if each.min_length else []
        case inspect.LiteralType() as literal:
            return literal.values[0]
        case inspect.StrType():
            return "a"
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.BoolType():
            return True
        case inspect.NoneType():
            return None
        case _:
            return {}


def _values(kind: inspect.Type, room: int) -> Iterator[tuple[str, bytes]]:
    if isinstance(kind, inspect.ListType):
        for name, item in _items(kind.item_type):
            yield f"of {name}", _list_of(item, room)
    elif isinstance(kind, inspect.StrType):
        yield "long", b'"%b"' % (b"the quick brown fox, " * (room // 21))
        yield "escaped", b'"%b"' % (b"\\u00e9" * (room // 6))
    else:
        keys = ",".join(f'"{index}":0' for index in range(room // 11)).encode()
        yield "table", b"{%b}" % keys
        yield "nested table", b'{"a":%b}' % _list_of(b"[]", room)
        if not isinstance(kind, inspect.DictType):
            yield "list", _list_of(b"[]", room)
            yield "deep", b"[" * (room // 2) + b"]" * (room // 2)


def _items(kind: inspect.Type) -> Iterator[tuple[str, bytes]]:
    for each in _kinds(kind):
        if isinstance(each, inspect.RawType):
            for item in dict.fromkeys(INPUT_ITEMS.values()):
                yield item.__name__, json.dumps(_least(inspect.type_info(item))).encode()
        elif not isinstance(each, inspect.NoneType):
            name = (
                each.cls.__name__ if isinstance(each, inspect.StructType) else type(each).__name__.removesuffix("Type")
            )
            yield name, json.dumps(_least(each), separators=(",", ":")).encode()
    yield "null", b"null"
    yield "{}", b"{}"
    yield "[]", b"[]"


def _list_of(item: bytes, room: int) -> bytes:
    return b"[%b]" % b",".join([item] * (room // (len(item) + 1)))
