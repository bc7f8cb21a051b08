"""Bodies that strict decoding refuses: what may be left out of them, and the fault of the others in words.

Clients send fields that Baton does not know with the value null, which asks for nothing. Such fields are left out, at
any depth, and the body is decoded again. Only a body that strict decoding has refused is looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw, inspect

from ...metadata.errors import RequestError
from .openai_types import PARTS_NOT_SERVED, MessagePart

MAX_NULLS = 1 << 16  # a body with more of them is not searched, since that would take long
_LONGEST_NAME = 64  # of a field that a sentence repeats or compares


class _Typed(msgspec.Struct):
    type: str = ""


def mended(body: bytes, kind: Any) -> bytes:
    """Return a JSON body without the fields that `kind` does not know and that are null.

    Raises RequestError that names the first other unknown field and the nearest known one, the first part of a message
    that is not text, or the first object of a type that is not served. A body with more than MAX_NULLS nulls, or one
    that is nested too deeply, is returned unchanged.
    """
    if body.count(b"null") > MAX_NULLS:
        return body
    try:
        return bytes(_mended(Raw(body.strip(b" \t\r\n")), _described(kind), ""))
    except RecursionError:
        return body


@cache
def _described(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _mended(value: Raw, kind: inspect.Type, path: str) -> Raw:
    """Return a value without unknown null fields. Only objects of known types, and lists of them, are unpacked."""
    first = bytes(memoryview(value)[:1])
    for each in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(each, inspect.StructType) and first == b"{":
            return Raw(msgspec.json.encode(_mended_object(value, each, path)))
        if isinstance(each, inspect.ListType) and isinstance(each.item_type, inspect.StructType) and first == b"[":
            items = msgspec.json.decode(value, type=list[Raw])
            kept = [_mended(item, each.item_type, f"{path}[{index}]") for index, item in enumerate(items)]
            return Raw(msgspec.json.encode(kept))
    return value


def _mended_object(value: Raw, kind: inspect.StructType, path: str) -> dict[str, Raw]:
    if issubclass(kind.cls, MessagePart):
        _check_part(value, path)
    _check_type(value, kind, path)
    known = {field.encode_name: field.type for field in kind.fields}
    kept: dict[str, Raw] = {}
    for name, item in msgspec.json.decode(value, type=dict[str, Raw]).items():
        if name in known:
            kept[name] = _mended(item, known[name], ".".join(each for each in (path, name) if each))
        elif not kind.forbid_unknown_fields:
            kept[name] = item
        elif bytes(item) != b"null":
            raise _unknown_field(path, name, known)
    return kept


def _check_part(value: Raw, path: str) -> None:
    """Raise RequestError for a part of a message whose type is known not to be text."""
    try:
        part = msgspec.json.decode(value, type=_Typed).type
    except msgspec.ValidationError:
        return  # its type is not even a string, which strict decoding says
    if part in PARTS_NOT_SERVED:
        raise RequestError(
            f"{path}: {PARTS_NOT_SERVED[part]} are not served ({part}); only parts of type text are",
            param=_top(path),
        )


def _check_type(value: Raw, kind: inspect.StructType, path: str) -> None:
    """Raise RequestError for an object whose `type` is a string that is not served."""
    served = next((field.type for field in kind.fields if field.encode_name == "type"), None)
    if not isinstance(served, inspect.LiteralType):
        return
    try:
        given = msgspec.json.decode(value, type=_Typed).type
    except msgspec.ValidationError:
        return  # as above
    if given and given not in served.values:
        field = f"{path}.type" if path else "type"
        names = ", ".join(map(str, served.values))
        raise RequestError(
            f"{field}: {given[:_LONGEST_NAME]} is not served; the served types are: {names}", param=_top(field)
        )


def _unknown_field(path: str, name: str, known: Iterable[str]) -> RequestError:
    """Return the refusal of a field. `path` leads to the object that has it, and is empty for the body itself."""
    nearest = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_NAME else []
    field = ".".join(each for each in (path, name[:_LONGEST_NAME] or "''") if each)
    hint = f"; the nearest known field is {nearest[0]}" if nearest else ""
    return RequestError(f"{field}: unknown field{hint}", param=_top(field))


def _top(path: str) -> str:
    """Return the field of the body in which a path begins."""
    return re.split(r"[.\[]", path)[0]
