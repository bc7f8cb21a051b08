"""Messages of every type, filled from their own declarations."""

from __future__ import annotations

import functools
import random
from typing import Any

from msgspec import inspect

from baton.metadata.cache.names import NAME_BYTES
from baton.metadata.wire.data_link import RankHello
from baton.metadata.wire.membership import CachedPages
from baton.metadata.wire.messages import Dispatch, Tokens
from baton.metadata.wire.request import pack_ids


def make_sample(kind: type, rng: random.Random) -> Any:
    """Return a valid value of a described type. The values reach the bounds."""
    return _value(_described(kind), rng)


_described = functools.cache(inspect.type_info)


def _integer(info: inspect.IntType, rng: random.Random) -> int:
    low = info.ge if info.ge is not None else -(2**63)
    high = info.le if info.le is not None else (info.lt - 1 if info.lt is not None else 2**63 - 1)
    return rng.choice([low, high, rng.randint(low, high)])


def _length(info: Any, rng: random.Random, most: int) -> int:
    low = info.min_length or 0
    high = most if info.max_length is None else min(info.max_length, most)
    return rng.randint(low, max(low, high))


def _value(info: Any, rng: random.Random) -> Any:
    """Return a small value of a described type, within its bounds and sometimes at them."""
    match info:
        case inspect.StructType():
            fields = {field.name: _value(field.type, rng) for field in info.fields}
            return info.cls(**fields | _fitting(info.cls, fields))
        case inspect.UnionType():
            return _value(rng.choice(info.types), rng)
        case inspect.IntType():
            return _integer(info, rng)
        case inspect.FloatType():
            low = info.ge if info.ge is not None else (0.5 if info.gt is not None else -1e6)
            return rng.uniform(low, info.le if info.le is not None else 1e6)
        case inspect.StrType() if info.pattern is not None:  # the only pattern: an inbox
            return rng.choice(["", f"baton-{rng.randbytes(16).hex()}"])
        case inspect.StrType():
            return "".join(rng.choice("aZ09-é漢🎈\n") for _ in range(_length(info, rng, 40)))
        case inspect.BytesType():
            return rng.randbytes(_length(info, rng, 40) // 4 * 4)
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.LiteralType():
            return rng.choice(info.values)
        case inspect.NoneType():
            return None
        case inspect.VarTupleType():
            return tuple(_value(info.item_type, rng) for _ in range(_length(info, rng, 3)))
        case inspect.DictType():
            pairs = ((_value(info.key_type, rng), _value(info.value_type, rng)) for _ in range(_length(info, rng, 3)))
            return dict(pairs)
        case _:
            raise AssertionError(f"a message field of a kind this test does not know: {info}")


def _fitting(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that must change so that the fields of the message fit together."""
    if kind is Tokens:
        column = pack_ids(range(len(fields["units"])))
        return {"firsts": column, "counts": column}
    if kind is CachedPages:
        return {name: NAME_BYTES * fields[name][: 1 << 14] for name in ("stored", "removed")}
    if issubclass(kind, Dispatch):
        return {"choices": tuple(dict.fromkeys(fields["choices"])) or (0,)}
    if kind is RankHello:
        return {"rank": fields["rank"] % fields["size"], "source_rank": fields["source_rank"] % fields["source_size"]}
    return {}
