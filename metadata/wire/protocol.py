"""Protocol versions: which version brought a field or a message, and which version two processes use.

A field that came later says so where it is declared, in any struct of a message, and has a default:

    num_tries: Annotated[Count, Since(7)] = 0

The field is not sent to older peers. In messages from older peers the default stands for it.

A message that was added later says so in its class, `since: ClassVar[int] = 7`, and is sent only to a peer that knows
it. A release that adds fields or messages raises PROTOCOL_MAX once. Fields are never removed, and never change their
meaning. A message may be removed together with the only transport that used it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, get_args, get_type_hints

import msgspec
from msgspec import Struct

PROTOCOL_MIN = 4
PROTOCOL_MAX = 8


@dataclass(frozen=True, slots=True)
class Since:
    """An annotation of a field: the protocol that brought it."""

    protocol: int


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. `since` is the protocol that brought the message."""

    since: ClassVar[int] = PROTOCOL_MIN


@lru_cache(1024)
def agreed(*ranges: tuple[int, int]) -> int | None:
    """Return the highest protocol that this process and peers of these ranges (lowest, highest) know; None if there is
    none."""
    lowest = max(PROTOCOL_MIN, *(low for low, _ in ranges))
    highest = min(PROTOCOL_MAX, *(high for _, high in ranges))
    return highest if lowest <= highest else None


def known(protocol: int) -> int:
    """Return the protocol in which to address a peer that names `protocol` (0: it names none)."""
    return min(max(PROTOCOL_MIN, protocol), PROTOCOL_MAX)


def is_newer(kind: type[Struct], old: int, new: int) -> bool:
    """Return whether a struct of this type has fields, in itself or in its fields' structs, that came after protocol
    `old` and not after `new`."""
    return any(old < since <= new for since in sinces(kind))


@cache
def sinces(kind: type[Struct]) -> frozenset[int]:
    """Return the protocols that brought fields of a struct, or of its fields' structs."""
    own, parts = _declared(kind)
    return frozenset(own.values()).union(*(sinces(part) for part in parts))


def fields_since(kind: type[Struct]) -> dict[str, int]:
    """Return the protocols that brought a struct's own later fields, by field name."""
    return _declared(kind)[0]


@cache
def _declared(kind: type[Struct]) -> tuple[dict[str, int], list[type[Struct]]]:
    """Return the protocols that brought a struct's own later fields, and the structs that its fields hold."""
    hints = get_type_hints(kind, include_extras=True)
    own: dict[str, int] = {}
    parts: list[type[Struct]] = []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        where = (kind.__name__, field.name)
        versions = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Since)]
        assert list(_versions(hint)) == versions and len(versions) <= 1, (
            where,
            "Since must be given once, for the whole field",
        )
        assert not (versions and field.required), (where, "a field that came later must have a default")
        if versions:
            own[field.name] = versions[0].protocol
        parts += _structs(hint)
    ages = [own.get(name, 0) for name in kind.__struct_fields__]
    config = kind.__struct_config__
    assert not config.array_like or ages == sorted(ages), (kind, "later fields must come last in an array")
    assert not config.array_like or config.tag is None, kind
    return own, parts


def _versions(hint: Any) -> Iterator[Since]:
    yield from (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Since))
    for part in get_args(hint):
        yield from _versions(part)


def _structs(hint: Any) -> Iterator[type[Struct]]:
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
    for part in get_args(hint):
        yield from _structs(part)
