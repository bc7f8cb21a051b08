"""Who may call what: API keys for clients, the admin key for operators, and how much each API key has under way.

route                     open to
/health                   everybody
/admin/*, /debug/*        the admin key. Where none is set: on loopback as /v1/*, elsewhere nobody
/v1/* and the rest        any API key, and the admin key. Where no API key is set: everybody
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

from aiohttp import web

from ...metadata.errors import ConfigError, Overloaded, RequestError
from ..config import RouterConfig
from ..errors import Forbidden, Unauthorized
from ..pace import Average

OPEN_ROUTES = ("/health",)
ADMIN_PREFIXES = ("/admin/", "/debug/")


class Caller:
    """All that come with one key, or without any."""

    __slots__ = ("is_admin", "num_sequences")

    def __init__(self, *, is_admin: bool = False) -> None:
        self.is_admin = is_admin
        self.num_sequences = 0  # under way: prompts times n


CALLER = web.RequestKey("caller", Caller)


class Access:
    """The keys of a router. `is_local`: it listens on loopback only.

    Raises ConfigError for a key file that cannot be read, and a limit by key where no key is set.
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
        self._seconds = Average()  # that requests last

    def caller_of(self, http_request: web.Request) -> Caller:
        """Who calls. Raises Unauthorized without a key that the route needs, Forbidden with one that is not enough."""
        if http_request.path in OPEN_ROUTES:
            return self._anyone
        caller = self._known(http_request)
        if http_request.path.startswith(ADMIN_PREFIXES):
            if self.has_admin_key:
                if caller is None:
                    raise Unauthorized("this route needs the admin key; send it as `Authorization: Bearer KEY`")
                if not caller.is_admin:
                    raise Forbidden("this route needs the admin key; an API key is not enough")
            elif not self.is_local:
                raise Forbidden("this route is closed, since the router has no admin key and is not on loopback")
        if caller is None and self.has_api_keys:
            raise Unauthorized("the API key is missing or wrong; send it as `Authorization: Bearer KEY`")
        return caller or self._anyone

    def may_operate(self, caller: Caller) -> bool:
        """Whether the caller may be told of nodes and what happens on them."""
        return caller.is_admin if self.has_admin_key else self.is_local

    @contextmanager
    def under_way(self, caller: Caller, num_sequences: int) -> Generator[None]:
        """Counts sequences as the caller's. Raises Overloaded above its limit, RequestError if it never fits."""
        limit = None if caller is self._anyone or caller.is_admin else self._limit
        if limit is not None and num_sequences > limit:
            raise RequestError(
                f"n: {num_sequences} sequences (prompts times n); a key may have {limit} at once", param="n"
            )
        if limit is not None and caller.num_sequences + num_sequences > limit:
            excess = caller.num_sequences + num_sequences - limit
            raise Overloaded(
                f"{caller.num_sequences} sequences of this API key are under way; it may have {limit}",
                retry_after_s=(self._seconds.mean or 1.0) * excess / limit,
            )
        caller.num_sequences += num_sequences
        try:
            yield
        finally:
            caller.num_sequences -= num_sequences

    def lasted(self, seconds: float) -> None:
        """A request was under way for so long."""
        self._seconds.add(seconds)

    def _known(self, http_request: web.Request) -> Caller | None:
        scheme, _, given = http_request.headers.get("Authorization", "").partition(" ")
        return self._callers.get(_digest(given.strip())) if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    """What keys are looked up by: the time that takes says nothing of how much of a key was right."""
    return hashlib.sha256(key.encode(errors="replace")).digest()
