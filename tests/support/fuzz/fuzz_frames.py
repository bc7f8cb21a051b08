"""Hostile frames: valid messages with changed fields, bytes or number of frames, and plain noise.

All draws come from a `random.Random`: hypothesis' own in CI, which shrinks failures, and a seeded one in long runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from baton.metadata.wire.frames import seal

MAX_NOISE = 300

_NUMBERS = (-(2**63), -(2**31) - 1, -(2**31), -1, 0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**53, 2**62, 2**63, 2**64 - 1)
_FLOATS = (-1.0, -0.0, 0.5, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "é漢🎈\n\0", "漢" * 128, "x" * 129, "x" * 5000, "../../etc/passwd", "tcp://0.0.0.0:1", "%s%n{}")


def noise(rng: random.Random, most: int = MAX_NOISE) -> bytes:
    return bytes(rng.getrandbits(8) for _ in range(rng.randint(0, most)))


def hostile_frames(rng: random.Random, message: Any) -> list[bytes]:
    """Return the frames of one ZeroMQ message, made from a valid one or from nothing."""
    frame = hostile_frame(rng, message)
    if rng.random() > 0.05:
        return [frame]
    return rng.choice([[], [frame] * 2, [b"", frame], [frame, noise(rng)], [frame] * 40])


def hostile_frame(rng: random.Random, message: Any) -> bytes:
    way = rng.random()
    if way < 0.08:
        return noise(rng)
    if way < 0.14:
        return seal(noise(rng))
    body = msgspec.msgpack.encode(message)
    if way < 0.3:
        return seal(body)
    if way < 0.75:
        tree = msgspec.to_builtins(message, builtin_types=(bytes,))
        for _ in range(rng.choice([1, 1, 2, 3])):
            tree = _change_tree(rng, tree)
        try:
            return seal(msgspec.msgpack.encode(tree))
        except (OverflowError, TypeError, ValueError, RecursionError):
            return seal(body)
    changed = hostile_bytes(rng, body)
    return seal(changed) if way < 0.95 else hostile_bytes(rng, seal(body))


def hostile_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with a few changes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randint(0, max(0, len(changed) - 1))
        match rng.randint(0, 5):
            case 0 if changed:
                changed[at] ^= 1 << rng.randint(0, 7)
            case 1 if changed:
                changed[at] = rng.choice(
                    [0, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC6, 0xCB, 0xCF, 0xD3, 0xDB, 0xDD, 0xDF, 0xFF]
                )
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = noise(rng, 12)
            case 4:
                changed[at:at] = changed[at : at + rng.randint(0, 40)]
            case _:
                del changed[at : at + rng.randint(1, 8)]
    return bytes(changed)


def _change_tree(rng: random.Random, tree: Any) -> Any:
    """Return the tree with one node replaced, left out, doubled, or moved elsewhere."""
    places = list(_places(tree))
    if not places:
        return _value(rng, tree)
    holder, key = rng.choice(places)
    match rng.randint(0, 6):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(_TEXTS)] = holder[key]
        case 2 if isinstance(holder, list):
            holder.extend([holder[key]] * rng.choice([1, 2, 200]))
        case 3:
            other, other_key = rng.choice(places)
            if not isinstance(other[other_key], dict | list):
                holder[key] = other[other_key]
        case _:
            holder[key] = _value(rng, holder[key])
    return tree


def _places(tree: Any, depth: int = 8) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in items:
        yield tree, key
        if depth:
            yield from _places(child, depth - 1)


def _value(rng: random.Random, old: Any) -> Any:
    """Return another value, often of the same kind."""
    kind = rng.random()
    if isinstance(old, bytes) and kind < 0.8:
        return _column(rng, old)
    if isinstance(old, bool) and kind < 0.5:
        return not old
    if isinstance(old, int) and kind < 0.8:
        return rng.choice([*_NUMBERS, old + 1, old - 1])
    makers: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: rng.choice(_NUMBERS),
        lambda: rng.choice(_FLOATS),
        lambda: rng.choice(_TEXTS),
        lambda: noise(rng, 40),
        list,
        dict,
        lambda: _deep(rng.choice([3, 100, 2000])),
        lambda: [rng.choice(_NUMBERS) for _ in range(rng.randint(0, 5))],
        lambda: {rng.choice([*_TEXTS, *_NUMBERS]): rng.choice(_NUMBERS)},
        lambda: msgspec.msgpack.Ext(rng.randint(-128, 127), noise(rng, 9)),
    )
    return rng.choice(makers)()


def _column(rng: random.Random, old: bytes) -> bytes:
    """Return another column: of other length, or with numbers that are negative, huge or doubled."""
    numbers = [int.from_bytes(old[at : at + 4], "little", signed=True) for at in range(0, len(old) - 3, 4)]
    match rng.randint(0, 5):
        case 0:
            return old[: rng.randint(0, len(old))]
        case 1:
            return old * rng.choice([2, 3, 50])
        case 2:
            return noise(rng, 40)
        case _:
            extra = [rng.choice([-1, 0, 1, 2, 3, 31, 32, 1 << 20, 2**31 - 1, -(2**31)])]
            at = rng.randint(0, len(numbers))
            numbers[at : at + rng.randint(0, 1)] = extra
            return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


def _deep(depth: int) -> Any:
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    return nested
