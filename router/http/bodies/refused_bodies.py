"""Repair of bodies that strict decoding refuses, and the fault in words if a body cannot be repaired.

Clients send fields that the types of bodies do not declare. The table of fields.py decides whether such a field is left
out, renamed or refused. Other unknown fields are left out if they are null. This is done at any depth, and the body is
decoded again. A body that strict decoding accepts never comes here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw, inspect

from ....metadata.deprecation import Replaced, warn_once
from ....metadata.errors import RequestError
from ..generation.tool_types import ClientTool
from ..generation.types import PARTS_NOT_SERVED, MessagePart
from .fields import Converted, Ignored, Merged, NotServed, Renamed, Rule, check_value, rules_of, sent_type

MAX_NULLS = 1 << 16  # a body with more of them is not searched, since that would take long
_SHORT = 64  # bytes of a value that the conversion of another field may look at
_LONGEST_NAME = 64  # of a field that a sentence repeats or compares
_INDEX = re.compile(r"\[\d+\]")


def mended(body: bytes, kind: Any) -> bytes:
    """Return a JSON body in which each field is one that `kind` declares. The others were left out or renamed.

    Raises RequestError for a field that is not served. It also names the first unknown field and the nearest known one,
    or the first object of a type that its place does not take, such as an image in a message. A body with more than
    MAX_NULLS nulls, or one that is nested too deeply, is returned unchanged.
    """
    if body.count(b"null") > MAX_NULLS:
        return body
    try:
        return bytes(_mended(Raw(body.strip(b" \t\r\n")), _described(kind), ""))
    except RecursionError:
        return body


@cache
def _described(kind: Any) -> inspect.Type:
    return inspect.type_info(sent_type(kind))


def _mended(value: Raw, kind: inspect.Type, path: str) -> Raw:
    """Return a value of which each field is declared. Only objects of known types, and lists of them, are unpacked."""
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
    """Return the declared fields of an object. If `kinds` are several, their tag tells which it is."""
    fields = msgspec.json.decode(value, type=dict[str, Raw])
    kind = _kind_of(fields, kinds, path)
    if kind is None:
        return fields
    known = {field.encode_name: field.type for field in kind.fields}
    rules = rules_of(kind.cls) if kind.forbid_unknown_fields else {}
    kept: dict[str, Raw] = {}
    others = list[tuple[str, Raw]]()  # that the type does not declare
    for name, item in fields.items():
        if name in known or not kind.forbid_unknown_fields or name == kind.tag_field:
            kept[name] = item
            if name in known and isinstance(rule := rules.get(name), NotServed):
                check_value(rule, msgspec.json.decode(item), _joined(path, name))
        else:
            others.append((name, item))
    while others:
        name, item = others.pop(0)
        if bytes(item) == b"null":
            continue
        if name not in rules:
            raise _unknown_field(path, name, (each for each in known if each not in rules))
        for target, given in _stands_for(rules[name], name, item, kept, path):
            if target.partition(".")[0] in known:
                _put(kept, target, given, name, path)
            else:
                others.append((target, given))
    for name in [each for each in kept if each in known]:
        kept[name] = _mended(kept[name], known[name], _joined(path, name))
    return kept


def _stands_for(rule: Rule, name: str, item: Raw, body: Mapping[str, Raw], path: str) -> Iterable[tuple[str, Raw]]:
    """Return the fields that a field stands for. Raises RequestError if it is not served."""
    match rule:
        case Ignored():
            return ()
        case Renamed():
            if rule.since is not None:
                field = _joined(_INDEX.sub("", path), name)
                warn_once(Replaced(f"the field {field} of requests", rule.to, rule.since))
            return ((rule.to, item),)
        case Merged():
            try:
                return msgspec.json.decode(item, type=dict[str, Raw]).items()
            except msgspec.ValidationError:
                field = _joined(path, name)
                raise RequestError(f"{field}: it must be an object", param=_top(field)) from None
        case Converted():
            plain = {each: msgspec.json.decode(given) for each, given in body.items() if len(given) < _SHORT}
            converted = rule.convert(msgspec.json.decode(item), plain)
            return ((each, Raw(msgspec.json.encode(given))) for each, given in converted.items() if given is not None)
        case NotServed():
            check_value(rule, msgspec.json.decode(item), _joined(path, name))
            return ()


def _put(kept: dict[str, Raw], target: str, item: Raw, name: str, path: str) -> None:
    """Set a field, or one of the object that a field is. Raises RequestError if the client gives it as well, with
    another value."""
    outer, _, inner = target.partition(".")
    holder = kept
    if inner:
        given: dict[str, Raw] | None = msgspec.json.decode(kept.get(outer, Raw(b"null")), type=dict[str, Raw] | None)
        holder = {} if given is None else given
    before = bytes(holder.get(inner or outer, b"null"))
    if before not in (b"null", bytes(item)):
        field = _joined(path, name)
        raise RequestError(f"{field}: excludes {target}, which is the same with another value", param=_top(field))
    holder[inner or outer] = item
    if inner:
        kept[outer] = Raw(msgspec.json.encode(holder))


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
            words += "; leave it out: the server runs no tools, and one that the client runs is given with its schema"
    raise RequestError(words, param=_top(path))


def _types_of(kind: inspect.StructType) -> list[str]:
    """Return the values that the field `type` of an object takes, if there is such a list."""
    (found,) = [field.type for field in kind.fields if field.encode_name == "type"] or [None]
    kinds = found.types if isinstance(found, inspect.UnionType) else (found,)
    return [str(value) for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values]


def _unknown_field(path: str, name: str, known: Iterable[str]) -> RequestError:
    """Return the refusal of a field. `path` leads to the object that has it, and is empty for the body itself."""
    nearest = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_NAME else []
    field = _joined(path, name[:_LONGEST_NAME] or "''")
    hint = f"; the nearest known field is {nearest[0]}" if nearest else ""
    return RequestError(f"{field}: unknown field{hint}", param=_top(field))


def _joined(path: str, name: str) -> str:
    """Return the path of a field of the object to which a path leads."""
    return f"{path}.{name}" if path else name


def _top(path: str) -> str:
    """Return the field of the body in which a path begins."""
    return re.split(r"[.\[]", path)[0]
