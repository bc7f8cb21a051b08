"""The key that a node expects of the router at one address.

An allow-list may name several routers (allow_list.py), and nobody says which of them is at an address that a name
resolves to. So the node expects the key of one router after the other, until a handshake succeeds.
"""

from __future__ import annotations

from ..logs import Throttle
from .allow_list import CHECK_S
from .curve import KeyPair

_NEXT_S = 0.3  # between two keys that are tried


class RouterKey:
    """The expected key, for the link and the heartbeat of a channel. The link's thread calls `succeed` and `fail`."""

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
