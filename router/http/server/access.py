"""Access by API keys: the routes that a caller may use, and the sequences that a key may have running at once.

A client sends its key as `Authorization: Bearer KEY`. Anthropic's clients send it in the header x-api-key. Each key
belongs to a tenant. If the line of the key names no tenant, a trusted proxy may name one.

A route needs    callers that may use it
nothing          everybody
a key            holders of an API key or of the admin key; everybody if the router has no API key
figures          holders of the admin key; everybody if the router has no key at all; nobody if it has API keys alone,
                 since figures name all tenants
the admin key    holders of the admin key; if the router has none: who may use routes that need a key if it listens on
                 loopback only, else nobody

`client_address` is the address of a client behind trusted proxies, from the headers X-Forwarded-For and Forwarded
(RFC 7239).

`CacheSalts` keep the prefix caches of tenants, or of keys, apart: a node matches only prompts of equal salt. The salt
begins with a keyed hash of the tenant, by which nodes remove a tenant's pages, and goes on with one of the key and of
the client's own `cache_salt`. Without the router's secret nobody can make the salt
of another owner. The tenant `default` without a `cache_salt` has no salt. Sessions, whose requests prefer the same
nodes, are kept apart in the same way.
"""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from ipaddress import ip_address
from weakref import WeakValueDictionary

from aiohttp import web

from ....metadata.errors import ConfigError, Overloaded, RequestError
from ....metadata.estimate import Estimate
from ...config import RouterConfig
from ...errors import Forbidden, Unauthorized
from ...keys import MAX_NAME, ApiKey, KeysFile, digest_of, is_name
from ...origins import Network, is_trusted, trusted_networks
from ...tenants.fair_share import DEFAULT, CacheScope, Tenant
from ...waiting.pace import MEMORY


class KeyLevel(enum.IntEnum):
    """Key that a route needs, in rising order."""

    NOTHING = 0
    KEY = 1
    FIGURES = 2
    ADMIN_KEY = 3


class Caller:
    """All clients that use one key, or that use none; of those that a proxy names tenants for, all of one tenant."""

    __slots__ = ("__weakref__", "digest", "is_admin", "name", "num_sequences", "tenant")

    def __init__(
        self, *, is_admin: bool = False, name: str = "", tenant: Tenant = DEFAULT, digest: bytes = b""
    ) -> None:
        self.is_admin = is_admin
        self.name = name  # of the key
        self.tenant = tenant
        self.digest = digest  # of the key; empty if none is needed
        self.num_sequences = 0  # that run now: prompts times n

    @property
    def words(self) -> str:
        """The tenant, and the key if it has a name, as logs show them."""
        return f"{self.tenant.name}/{self.name}" if self.name else self.tenant.name


CALLER = web.RequestKey("caller", Caller)
IS_OPERATOR = web.RequestKey("is_operator", bool)  # the caller may read about nodes and models


def label_of(caller: Caller | None) -> str:
    """Return the words for a caller in the log; None: the request was refused before its caller was known."""
    if caller is None:
        return "an unknown caller"
    return "an operator" if caller.is_admin else caller.words


def share_of(caller: Caller) -> Hashable:
    """Return whose share the work on a caller's requests takes: bytes of bodies, and turns at work that takes long."""
    return caller.tenant.name


class Access:
    """Keys of a router. `is_local`: the router listens on loopback only. The keys' file is read again when it changes.

    Raises ConfigError for a key file that cannot be used, and for a limit per key if no key is set.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.is_local = False
        self._limit = config.max_concurrent_per_key
        self._anyone = Caller()
        self._file = KeysFile(config.api_keys) if config.api_keys is not None else None
        self._fixed = [ApiKey(config.api_key)] if config.api_key is not None else []
        self._admin = None if config.admin_key is None else digest_of(config.admin_key)
        self._callers: dict[bytes, Caller] = {}
        self._removed: set[str] = set()  # tenants without a key
        self._take_keys()
        self.has_api_keys = bool(self._callers)
        self.has_admin_key = self._admin is not None
        if self._admin is not None:
            self._callers[self._admin] = Caller(is_admin=True, name="admin", digest=self._admin)
        if self._limit is not None and not self.has_api_keys:
            raise ConfigError("max_concurrent_per_key is set, but no API key is: give --api-key or --api-keys as well")
        self._durations = Estimate(memory=MEMORY)  # seconds that requests took
        self._proxies, self._header = trusted_networks(config.trusted_proxy), config.tenant_header
        self._named: WeakValueDictionary[tuple[bytes, str], Caller] = WeakValueDictionary()  # by a proxy

    def caller_of(self, http_request: web.Request, needs: KeyLevel) -> Caller:
        """Return the caller. Raises Unauthorized if the key that the route needs is missing or wrong.

        Raises Forbidden if the key is valid but not enough.
        """
        caller = self._known(http_request)
        if needs is KeyLevel.NOTHING:
            return caller or self._anyone
        if needs is KeyLevel.ADMIN_KEY or (needs is KeyLevel.FIGURES and (self.has_api_keys or self.has_admin_key)):
            instead = "; --ops-address serves it without a key" if needs is KeyLevel.FIGURES else ""
            if self.has_admin_key:
                if caller is None:
                    raise Unauthorized(
                        f"this route needs the admin key; send it as `Authorization: Bearer KEY`{instead}"
                    )
                if not caller.is_admin:
                    raise Forbidden(f"this route needs the admin key; an API key is not enough{instead}")
            elif needs is KeyLevel.FIGURES:
                raise Forbidden(f"this route is closed, since the router has API keys and no admin key{instead}")
            elif not self.is_local:
                raise Forbidden(
                    "this route is closed, since the router has no admin key and is not on loopback: start the router "
                    "with BATON_ADMIN_KEY (or --admin-key)"
                )
        if caller is None and self.has_api_keys:
            raise Unauthorized("the API key is missing or wrong; send it as `Authorization: Bearer KEY` or x-api-key")
        return self._of_tenant(http_request, caller or self._anyone)

    def may_operate(self, caller: Caller) -> bool:
        """Return whether the caller may read about nodes and their state."""
        if self.has_admin_key:
            return caller.is_admin
        return self.is_local and not (self.has_api_keys and caller is self._anyone)

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
        self._durations.observe(seconds)

    def take_removed(self) -> list[str]:
        """Return the names of the tenants whose last key was removed since the last call."""
        removed, self._removed = self._removed, set()
        return sorted(removed)

    def look(self, *, force: bool = False) -> None:
        """Read the keys' file again if it has changed, or in any case with `force`."""
        if self._file is not None and self._file.look(force=force):
            self._read_again()

    @property
    def complaint(self) -> str:
        """What is wrong with the keys' file; empty if nothing is."""
        return self._file.complaint if self._file is not None else ""

    def _known(self, http_request: web.Request) -> Caller | None:
        scheme, _, given = http_request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = http_request.headers.get("x-api-key", "")
        given = given.strip()
        self.look()
        return self._callers.get(digest_of(given)) if given else None

    def _of_tenant(self, http_request: web.Request, caller: Caller) -> Caller:
        """Return the caller of the tenant that a trusted proxy names, or the caller itself."""
        if self._header is None or caller.tenant.name != DEFAULT.name or caller.is_admin:
            return caller
        names = http_request.headers.getall(self._header, ())
        if not names or not is_trusted(http_request.remote, self._proxies):
            return caller
        name = names[0].strip()
        if len(names) > 1 or not is_name(name):
            raise RequestError(f"{self._header}: must be one name of at most {MAX_NAME} characters")
        if name == caller.tenant.name:
            return caller
        key = caller.digest, name
        named = self._named.get(key)
        if named is None:
            named = self._named[key] = Caller(name=caller.name, tenant=Tenant(name), digest=caller.digest)
        return named

    @property
    def _tenants(self) -> set[str]:
        return {caller.tenant.name for caller in self._callers.values()}

    def _take_keys(self) -> None:
        """Make the callers of all keys. A key that stays keeps its caller, whose requests run. Raises ConfigError."""
        keys = {key.digest: key for key in (*self._fixed, *(self._file.keys if self._file is not None else ()))}
        if self._admin in keys:
            raise ConfigError("admin_key is also an API key; it must be another one")
        known, self._callers = self._callers, {}
        for digest, key in keys.items():
            caller = self._callers[digest] = known.get(digest) or Caller(digest=digest)
            caller.name, caller.tenant = key.name, key.tenant

    def _read_again(self) -> None:
        assert self._file is not None, "only a file is read again"
        admin = self._callers.get(self._admin) if self._admin is not None else None
        before = self._tenants
        try:
            self._take_keys()
        except ConfigError as error:
            self._file.complain(str(error))
        self._removed = (self._removed | before) - self._tenants - {DEFAULT.name}
        if self._admin is not None and admin is not None:
            self._callers[self._admin] = admin


_FOR = re.compile(r'(?:^|[;\s])for="?(\[[^\]"]*\]|[^;,\s"]*)', re.IGNORECASE)


def client_address(peer: str, headers: Mapping[str, str], trusted: Sequence[Network]) -> str:
    """Return the address that a request came from: the last one that no trusted proxy has.

    `peer` is that of the connection. A header is believed only if a trusted proxy sent it; what stands in it before
    the first other address is the client's own invention.
    """
    if not trusted or not is_trusted(peer, trusted):
        return peer
    address = peer
    if "X-Forwarded-For" in headers:
        hops = [_address(each) for each in headers["X-Forwarded-For"].split(",")]
    else:
        hops = [_address(found[1]) for each in headers.get("Forwarded", "").split(",") if (found := _FOR.search(each))]
    for hop in reversed(hops):
        if hop is None:
            break
        address = hop
        if not is_trusted(hop, trusted):
            break
    return address


def _address(text: str) -> str | None:
    """Return an address without its port, None if it is none, such as `unknown`."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ip_address(text))
    except ValueError:
        return None


MAX_SESSION_ID = 256  # characters of a session's id; a longer one is no id
SESSION_HEADERS = (  # with the id of a session; the first that is there counts
    "x-session-id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-smg-routing-key",
    "x-litellm-session-id",
    "x-grok-conv-id",
    "session-id",
    "session_id",
)


class CacheSalts:
    """Salts of one router, or of several that were given the same secret. Without one it is drawn now."""

    def __init__(self, scope: CacheScope, secret: str | None) -> None:
        self._scope = scope
        # a key of any length becomes one of 32 bytes
        self._secret = blake2b(secret.encode(), digest_size=32).digest() if secret else secrets.token_bytes(32)

    def salt(self, caller: Caller, given: str | None) -> str:
        """Return the salt of a caller's prompts. `given`: the client's `cache_salt`."""
        key = caller.digest if self._scope == "key" else b""
        if caller.tenant.name == DEFAULT.name and not key and not given:
            return ""
        name = caller.tenant.name
        return self.prefix(name) + self._hash(b"salt", name.encode(), key, (given or "").encode()).hex()

    def prefix(self, tenant: str) -> str:
        """Return how the salts of a tenant begin."""
        return self._hash(b"tenant", tenant.encode()).hex()

    def session(self, caller: Caller, given: str) -> bytes:
        """Return the key of a client's session. Sessions of different owners never meet."""
        key = caller.digest if self._scope == "key" else b""
        return self._hash(b"session", caller.tenant.name.encode(), key, given.encode(errors="replace"))

    def _hash(self, *parts: bytes) -> bytes:
        hashed = blake2b(digest_size=16, key=self._secret)
        for part in parts:  # with its length, so that parts cannot run into each other
            hashed.update(len(part).to_bytes(4, "big") + part)
        return hashed.digest()


def session_id(headers: Mapping[str, str], prompt_cache_key: str | None) -> str | None:
    """Return the session of a request: a header's, else the body's `prompt_cache_key`. None if there is none."""
    for name in SESSION_HEADERS:
        given = headers.get(name, "").strip()
        if given:
            return given if len(given) <= MAX_SESSION_ID else None
    return prompt_cache_key if prompt_cache_key and len(prompt_cache_key) <= MAX_SESSION_ID else None
