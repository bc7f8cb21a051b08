"""Bodies that strict decoding refuses: what may be left out of them, and the fault of the others in words.

Clients send fields that Baton does not know with the value null, which asks for nothing. Such fields are left out, at
any depth, and the body is decoded again. Only a body that strict decoding has refused is looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

import msgspec
from msgspec import inspect

from ...metadata.errors import RequestError
from .openai_types import PARTS_NOT_SERVED, TextPart

_LONGEST_NAME = 64  # of a field that a sentence repeats or compares


def mended(body: bytes, kind: Any) -> bytes:
    """Return a JSON body without the fields that `kind` does not know and that are null.

    Raises RequestError that names the first other unknown field and the nearest known one, or the first part of a
    message that is not text.
    """
    return msgspec.json.encode(_mended(msgspec.json.decode(body), _described(kind), ""))


@cache
def _described(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _mended(value: Any, kind: inspect.Type, path: str) -> Any:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, dict):
        for each in kinds:
            if isinstance(each, inspect.StructType):
                return _mended_object(cast("dict[str, Any]", value), each, path)
    if isinstance(value, list):
        for each in kinds:
            if isinstance(each, inspect.ListType):
                items = cast("list[Any]", value)
                return [_mended(item, each.item_type, f"{path}[{index}]") for index, item in enumerate(items)]
    return value  # pyright: ignore[reportUnknownVariableType]


def _mended_object(fields: dict[str, Any], kind: inspect.StructType, path: str) -> dict[str, Any]:
    part = fields.get("type")
    if kind.cls is TextPart and isinstance(part, str) and part in PARTS_NOT_SERVED:
        raise RequestError(
            f"{path}: {PARTS_NOT_SERVED[part]} are not served ({part}); only parts of type text are",
            param=re.split(r"[.\[]", path)[0],
        )
    known = {field.encode_name: field.type for field in kind.fields}
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in known:
            kept[name] = _mended(value, known[name], ".".join(each for each in (path, name) if each))
        elif not kind.forbid_unknown_fields:
            kept[name] = value
        elif value is not None:
            raise _unknown_field(path, name, known)
    return kept


def _unknown_field(path: str, name: str, known: Iterable[str]) -> RequestError:
    """Return the refusal of a field. `path` leads to the object that has it, and is empty for the body itself."""
    nearest = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_NAME else []
    field = ".".join(each for each in (path, name[:_LONGEST_NAME] or "''") if each)
    hint = f"; the nearest known field is {nearest[0]}" if nearest else ""
    return RequestError(f"{field}: unknown field{hint}", param=re.split(r"[.\[]", field)[0] or None)
