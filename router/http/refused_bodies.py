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
from .tool_types import ClientTool

MAX_NULLS = 1 << 16  # a body with more of them is not searched, since that would take long
_LONGEST_NAME = 64  # of a field that a sentence repeats or compares


def mended(body: bytes, kind: Any) -> bytes:
    """Return a JSON body without the fields that `kind` does not know and that are null.

    Raises RequestError that names the first other unknown field and the nearest known one, or the first object of a
    type that its place does not take, such as an image in a message. A body with more than MAX_NULLS nulls, or one
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
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    structs = [each for each in kinds if isinstance(each, inspect.StructType)]
    if structs and first == b"{":
        return Raw(msgspec.json.encode(_mended_object(value, structs, path)))
    lists = [each for each in kinds if isinstance(each, inspect.ListType) and _holds_objects(each.item_type)]
    if lists and first == b"[":
        items = msgspec.json.decode(value, type=list[Raw])
        kept = [_mended(item, lists[0].item_type, f"{path}[{index}]") for index, item in enumerate(items)]
        return Raw(msgspec.json.encode(kept))
    return value


def _holds_objects(kind: inspect.Type) -> bool:
    return any(
        isinstance(each, inspect.StructType)
        for each in (kind.types if isinstance(kind, inspect.UnionType) else (kind,))
    )


def _mended_object(value: Raw, kinds: list[inspect.StructType], path: str) -> dict[str, Raw]:
    """Return the fields of an object without unknown null ones. If `kinds` are several, their tag tells which it is."""
    fields = msgspec.json.decode(value, type=dict[str, Raw])
    kind = _kind_of(fields, kinds, path)
    if kind is None:
        return fields
    known = {field.encode_name: field.type for field in kind.fields}
    kept: dict[str, Raw] = {}
    for name, item in fields.items():
        if name in known:
            kept[name] = _mended(item, known[name], ".".join(each for each in (path, name) if each))
        elif not kind.forbid_unknown_fields or name == kind.tag_field:
            kept[name] = item
        elif bytes(item) != b"null":
            raise _unknown_field(path, name, known)
    return kept


def _kind_of(fields: dict[str, Raw], kinds: list[inspect.StructType], path: str) -> inspect.StructType | None:
    """Return the type of an object, None if its tag is absent or no text. Raises RequestError for an object whose tag
    or `type` is none of those that its place takes."""
    name = kinds[0].tag_field or "type"
    takes = {each.tag: each for each in kinds} if kinds[0].tag_field else dict.fromkeys(_types_of(kinds[0]), kinds[0])
    if not takes:
        return kinds[0]
    try:
        said = msgspec.json.decode(fields.get(name, Raw(b"null")), type=str)
    except msgspec.ValidationError:
        return kinds[0] if kinds[0].tag_field is None else None
    if said in takes:
        return takes[said]
    served = ", ".join(map(str, takes))
    if issubclass(kinds[0].cls, MessagePart) and said in PARTS_NOT_SERVED:
        words = f"{path}: {PARTS_NOT_SERVED[said]} are not served ({said}); only parts of type {served} are"
    else:
        words = f"{path}.{name}: {said[:_LONGEST_NAME]!r} is not served; served are: {served}"
        if issubclass(kinds[0].cls, ClientTool):
            words += "; leave it out: the server runs no tools"
    raise RequestError(words, param=_top(path))


def _types_of(kind: inspect.StructType) -> list[str]:
    """Return the values that the field `type` of an object takes, if there is such a list."""
    (found,) = [field.type for field in kind.fields if field.encode_name == "type"] or [None]
    kinds = found.types if isinstance(found, inspect.UnionType) else (found,)
    return [str(value) for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values]


def _unknown_field(path: str, name: str, known: Iterable[str]) -> RequestError:
    """Return the refusal of a field. `path` leads to the object that has it, and is empty for the body itself."""
    nearest = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_NAME else []
    field = ".".join(each for each in (path, name[:_LONGEST_NAME] or "''") if each)
    hint = f"; the nearest known field is {nearest[0]}" if nearest else ""
    return RequestError(f"{field}: unknown field{hint}", param=_top(field))


def _top(path: str) -> str:
    """Return the field of the body in which a path begins."""
    return re.split(r"[.\[]", path)[0]
