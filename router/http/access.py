"""API keys: who may call which route, and how many sequences each key may have running. A client sends its key as
`Authorization: Bearer KEY`, or, as Anthropic's clients do, in the header x-api-key.

A route needs    callers that may use it
nothing          everybody
a key            holders of an API key or of the admin key; everybody if the router has no API key
the admin key    holders of the admin key; if the router has none: the callers above if it listens on loopback only,
                 else nobody
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Generator, Hashable
from contextlib import contextmanager

from aiohttp import web

from ...metadata.errors import ConfigError, Overloaded, RequestError
from ..config import RouterConfig
from ..errors import Forbidden, Unauthorized
from ..pace import Average


class KeyLevel(enum.IntEnum):
    """Key that a route needs, in rising order."""

    NOTHING = 0
    KEY = 1
    ADMIN_KEY = 2


class Caller:
    """All clients that use one key, or that use none."""

    __slots__ = ("is_admin", "num_sequences")

    def __init__(self, *, is_admin: bool = False) -> None:
        self.is_admin = is_admin
        self.num_sequences = 0  # that run now: prompts times n


CALLER = web.RequestKey("caller", Caller)


def label_of(caller: Caller | None) -> str:
    """Return the words for a caller in the log; None: the request was refused before its caller was known."""
    if caller is None:
        return "an unknown caller"
    return "an operator" if caller.is_admin else "a client"


def share_of(caller: Caller) -> Hashable:
    """Return whose share the work on a caller's requests takes: bytes of bodies, and turns at work that takes long."""
    return caller


class Access:
    """Keys of a router. `is_local`: the router listens on loopback only.

    Raises ConfigError for a key file that cannot be read, and for a limit per key if no key is set.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.is_local = False
        self._limit = config.max_concurrent_per_key
        self._anyone = Caller()
        self._callers = {_digest(key): Caller() for key in config.client_keys}
        self.has_api_keys = bool(self._callers)
        self.has_admin_key = config.admin_key is not None
        if config.admin_key is not None:
            if _digest(config.admin_key) in self._callers:
                raise ConfigError("admin_key is also an API key; it must be another one")
            self._callers[_digest(config.admin_key)] = Caller(is_admin=True)
        if self._limit is not None and not self.has_api_keys:
            raise ConfigError("max_concurrent_per_key is set, but no API key is: give --api-key or --api-keys as well")
        self._durations = Average()  # seconds that requests took

    def caller_of(self, http_request: web.Request, needs: KeyLevel) -> Caller:
        """Return the caller. Raises Unauthorized if the key that the route needs is missing or wrong.

        Raises Forbidden if the key is valid but not enough.
        """
        if needs is KeyLevel.NOTHING:
            return self._anyone
        caller = self._known(http_request)
        if needs is KeyLevel.ADMIN_KEY:
            if self.has_admin_key:
                if caller is None:
                    raise Unauthorized("this route needs the admin key; send it as `Authorization: Bearer KEY`")
                if not caller.is_admin:
                    raise Forbidden("this route needs the admin key; an API key is not enough")
            elif not self.is_local:
                raise Forbidden("this route is closed, since the router has no admin key and is not on loopback")
        if caller is None and self.has_api_keys:
            raise Unauthorized("the API key is missing or wrong; send it as `Authorization: Bearer KEY` or x-api-key")
        return caller or self._anyone

    def may_operate(self, caller: Caller) -> bool:
        """Return whether the caller may read about nodes and their state."""
        return caller.is_admin if self.has_admin_key else self.is_local

    @contextmanager
    def counted(self, caller: Caller, num_sequences: int) -> Generator[None]:
        """Count sequences as running for the caller while the block runs.

        Raises Overloaded if the caller has too many, RequestError if so many can never fit its limit.
        """
        limit = None if caller is self._anyone or caller.is_admin else self._limit
        if limit is not None and num_sequences > limit:
            raise RequestError(
                f"n: {num_sequences} sequences (prompts times n); a key may have {limit} at once", param="n"
            )
        if limit is not None and caller.num_sequences + num_sequences > limit:
            excess = caller.num_sequences + num_sequences - limit
            raise Overloaded(
                f"{caller.num_sequences} sequences of this API key are under way; it may have {limit}",
                retry_after_s=(self._durations.mean or 1.0) * excess / limit,
            )
        caller.num_sequences += num_sequences
        try:
            yield
        finally:
            caller.num_sequences -= num_sequences

    def add_duration(self, seconds: float) -> None:
        """Record how long a request took. The estimate in Retry-After is made from these."""
        self._durations.add(seconds)

    def _known(self, http_request: web.Request) -> Caller | None:
        scheme, _, given = http_request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = http_request.headers.get("x-api-key", "")
        given = given.strip()
        return self._callers.get(_digest(given)) if given else None


def _digest(key: str) -> bytes:
    """Return the digest of a key. Keys are looked up by it, so the time of a look-up reveals nothing about a key."""
    return hashlib.sha256(key.encode(errors="replace")).digest()
