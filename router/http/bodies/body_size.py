"""Size of a JSON body before it is decoded: what it would cost, counted on its bytes.

A small number of bytes can hold many values, and each costs time when it is decoded, checked and rendered. So bodies
with very many values are refused before anything is made of them.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from msgspec import inspect

from ....metadata.errors import RequestError
from ....metadata.wire.request import MAX_CONTEXT

MAX_VALUES = 1 << 17  # texts, names of fields, lists and objects; 4,096 messages with a call each have about 80,000
MAX_PLAIN = 2 * MAX_VALUES  # commas, and so numbers and the like
MAX_IDS = MAX_CONTEXT + MAX_VALUES  # commas of a body whose type has a list of token ids without a lower bound
SMALL_VALUES = 1 << 12
SMALL_BYTES = 256 << 10


class BodySize(NamedTuple):
    """Bytes of a body, and a bound on the number of its texts, names, lists and objects."""

    num_bytes: int
    num_values: int

    @property
    def is_small(self) -> bool:
        """Whether the event loop itself may turn the body into a prompt."""
        return self.num_values <= SMALL_VALUES and self.num_bytes <= SMALL_BYTES


_NO_BODY = BodySize(0, 0)
BODY_SIZE: ContextVar[BodySize] = ContextVar("body_size", default=_NO_BODY)  # of the HTTP request being served


@cache
def most_plain(kind: Any) -> int:
    """Return how many commas a body of a type may have outside of its texts."""
    return MAX_IDS if takes_ids(kind) else MAX_PLAIN


@cache
def takes_ids(kind: Any) -> bool:
    """Return whether a body of a type may have a prompt's token ids."""
    described = inspect.type_info(kind)
    fields = described.fields if isinstance(described, inspect.StructType) else ()
    return any(_takes_ids(field.type) for field in fields)


def _takes_ids(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(map(_takes_ids, kind.types))
    if not isinstance(kind, inspect.ListType) or (kind.max_length or MAX_CONTEXT) < MAX_CONTEXT:
        return False
    items = kind.item_type.types if isinstance(kind.item_type, inspect.UnionType) else (kind.item_type,)
    return any(isinstance(each, inspect.IntType) for each in items)


def quick_size(data: bytes, most_plain: int) -> BodySize | None:
    """Return the size of a body, None if brackets and quotes in its texts must not be counted, which takes longer."""
    num_values, num_plain = _counts(data)
    return BodySize(len(data), num_values) if num_values <= MAX_VALUES and num_plain <= most_plain else None


def exact_size(data: bytes, most_plain: int) -> BodySize:
    """Return the size of a body. Raises RequestError for one with too many values."""
    num_values, num_plain = _counts(_without_texts(data))
    if num_values > MAX_VALUES:
        raise RequestError(
            f"the body has {num_values} texts, names of fields, lists and objects; at most {MAX_VALUES} are served"
        )
    if num_plain > most_plain:
        raise RequestError(f"the body has {num_plain} values; at most {most_plain} are served")
    return BodySize(len(data), num_values)


def _counts(data: bytes) -> tuple[int, int]:
    """Return the number of texts, lists and objects, and that of commas, as if no text held a quote or bracket."""
    return data.count(b'"') // 2 + data.count(b"[") + data.count(b"{"), data.count(b",")


def _without_texts(data: bytes) -> bytes:
    """Return a body with empty texts. A body with too many texts is returned with its quotes alone."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_quotes = data.count(b'"')
    if num_quotes > 2 * MAX_VALUES:
        return b'"' * num_quotes
    return b'""'.join(data.split(b'"')[::2])
