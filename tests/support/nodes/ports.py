"""Listeners that take over the port of another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from baton.metadata.errors import ConfigError

T = TypeVar("T")


async def bind_again(make: Callable[[], T]) -> T:
    """Return what `make` makes, as soon as the port of a listener that was just closed is free: within a second."""
    for _ in range(100):
        try:
            return make()
        except ConfigError:
            await asyncio.sleep(0.01)
    return make()
