"""The addresses of a node's routers: those of a list, and all that a name of the list resolves to.

A name is asked again every RESOLVE_S, in a thread, because an answer may take seconds. If a name has IPv4 addresses,
its IPv6 addresses are not used: they are mostly the same hosts. If a name cannot be resolved, its last addresses stay.

An allow-list may name several routers (allow_list.py), and nobody says which of them is at an address that a name
resolves to. So the node expects the key of one router after the other, until a handshake succeeds (`RouterKey`).
"""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import replace

from ..errors import ConfigError
from ..logs import Throttle
from .addresses import Address, is_literal, parse_address
from .allow_list import CHECK_S
from .curve import KeyPair

logger = logging.getLogger(__name__)

RESOLVE_S = 2.0
MAX_ROUTERS = 32  # addresses of one name
_NEXT_S = 0.3  # between two keys that are tried


def router_entries(text: str) -> tuple[str, ...]:
    """Return the addresses of `--router`, which are separated by commas. Raises ConfigError if one is malformed, or if
    none is there."""
    entries = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not entries:
        raise ConfigError(f"router is {text!r}; give an address, like tcp://HOST:5700, or several, separated by commas")
    for entry in entries:
        parse_address(entry)
    return entries


class RouterAddresses:
    """The present addresses of the routers that `--router` lists. Raises ConfigError as `router_entries` does."""

    def __init__(self, text: str) -> None:
        self._entries = {entry: parse_address(entry) for entry in router_entries(text)}
        self._found: dict[str, tuple[str, ...]] = {  # by entry; replaced as a whole by the thread
            entry: () if is_name(address) else (entry,) for entry, address in self._entries.items()
        }
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._complaints: dict[str, str] = {}

    @property
    def current(self) -> tuple[str, ...]:
        """The addresses as of the last look, in the order of the list."""
        return tuple(dict.fromkeys(address for found in self._found.values() for address in found))

    def start(self) -> None:
        """Begin to resolve names, if there are any."""
        if any(map(is_name, self._entries.values())):
            self._thread = threading.Thread(target=self._run, name="baton-routers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop resolving names. An answer that is under way is not awaited."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.look()
            self._is_over.wait(RESOLVE_S)

    def look(self) -> None:
        """Resolve all names once."""
        found = dict(self._found)
        for entry, address in self._entries.items():
            if is_name(address):
                try:
                    found[entry] = resolve(address)
                    self._complaints.pop(entry, None)
                except OSError as error:
                    self._complain(entry, f"{address.host} cannot be resolved: {error.strerror}")
        self._found = found

    def _complain(self, entry: str, words: str) -> None:
        if self._complaints.get(entry) != words:
            self._complaints[entry] = words
            logger.warning("router %s: %s; asking again every %g s", entry, words, RESOLVE_S)


def resolve(address: Address) -> tuple[str, ...]:
    """Return the addresses that a name resolves to, sorted: the IPv4 ones, or, if there is none, the IPv6 ones. Raises
    OSError."""
    hosts: dict[int, set[str]] = {socket.AF_INET: set(), socket.AF_INET6: set()}
    for family, _, _, _, name in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        hosts.setdefault(family, set()).add(str(name[0]))
    chosen = sorted(hosts[socket.AF_INET] or hosts[socket.AF_INET6])
    return tuple(str(replace(address, host=host)) for host in chosen[:MAX_ROUTERS])


def is_name(address: Address) -> bool:
    """Return whether an address has a name that may resolve to several hosts. `localhost` is always this one."""
    return address.scheme == "tcp" and not address.is_loopback and not is_literal(address.host)


class RouterKey:
    """The key that a node expects of the router at one address, for the link and the heartbeat of a channel. The link's
    thread calls `succeed` and `fail`."""

    def __init__(self, keys: KeyPair | None) -> None:
        self._keys = keys
        self._list = None if keys is None else keys.allow_list
        self._name = "" if self._list is None else self._list.router_names[0]
        self._num_failed = 0  # handshakes since the last one that succeeded
        self._looks, self._tries = Throttle(CHECK_S), Throttle(_NEXT_S)

    @property
    def current(self) -> bytes | None:
        """The public key, 40 bytes of Z85; None: there are no keys. Reads the list about once per second: a line may
        have another key, or be gone, and then it is the next router's key."""
        if self._list is None:
            return None if self._keys is None else self._keys.public
        if self._looks.is_due():
            self._list.look()
        key = self._list.key_of(self._name)
        if key is None:
            self._name = self._next_name()
            key = self._list.server_key(self._name)
        return key

    @property
    def has_untried(self) -> bool:
        """Whether there is a router whose key was not expected since a handshake succeeded."""
        return self._list is not None and self._num_failed < len(self._list.router_names)

    def succeed(self) -> None:
        """The router has this key."""
        self._num_failed = 0

    def fail(self) -> None:
        """A handshake has failed: expect the next router's key."""
        if self._list is not None and self._tries.is_due():
            self._num_failed += 1
            self._name = self._next_name()

    def _next_name(self) -> str:
        assert self._list is not None, "there are names only in a list"
        names = self._list.router_names
        return next((name for name in names if name > self._name), names[0])
