"""Draws who computes each prompt, in a router whose --local-prefill is always: a prefill node or the decode node.

    monkeypatch.setattr(Entry, "place", drawn_place(lambda: seed))

Every attempt at a request has a draw of its own, so a request may begin at one place and go on at the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Literal, get_args

from baton.router.nodes.prompt_role import PromptPlace
from baton.router.waiting.entry import Entry

Place = Literal["remote", "local", "mixed"]  # who computes the prompts; mixed: drawn for each
PLACES: tuple[Place, ...] = get_args(Place)


def drawn_place(seed: Callable[[], int | None]) -> property:
    """Return a property in the place of `Entry.place`. `seed()` None: the router decides."""
    decided = Entry.place.fget
    assert decided is not None

    def place(entry: Entry) -> PromptPlace:
        found, drawn = decided(entry), seed()
        if drawn is None or found.reason != "always" or is_local(drawn, abs(entry.turn[1])):
            return found
        return PromptPlace("remote", "never")

    return property(place)


def is_local(seed: int, number: int) -> bool:
    """Return the draw for the entry that was queued as this number. Of two neighbours, 2 i and 2 i + 1, one is local
    and the other is not, so several requests that come together have both."""
    return bool((zlib.crc32(f"{seed} {number // 2}".encode()) ^ number) & 1)
