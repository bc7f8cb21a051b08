"""The router's port for nodes, as this host reaches it: by TCP, and by the handshake of a node with its key."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Literal, NamedTuple

from ...metadata.bus.addresses import parse_address
from ...metadata.bus.curve import KeyPair
from ...metadata.bus.link import Link
from ...metadata.bus.router_addresses import is_name, resolve, router_entries
from ...metadata.bus.sockets import new_epoch
from ...metadata.config import ProcessConfig
from ...metadata.errors import ConfigError

_CONNECT_S = 3.0
_LOOK_S = 0.02
_IP_MTU = 14  # linux/in.h; the socket module does not name it
_SIGNATURE = b"\xff"  # first byte that a ZeroMQ socket sends


class Reached(NamedTuple):
    """The router's port for nodes, as this host reaches it. `failure` is empty if a ZeroMQ socket answered. `key` says
    whether it took the key of --keys, or a node without a key if none is given; untried: there is nothing to try."""

    address: str
    failure: str = ""
    path_mtu: int | None = None
    key: Literal["taken", "refused", "unanswered", "untried"] = "untried"


def reach_all(routers: str, keys: str | None, allow_list: str | None) -> tuple[Reached, ...]:
    """Try every router of a node's `--router`, at every address that its name resolves to."""
    found: list[Reached] = []
    for entry in router_entries(routers):
        try:
            addresses = resolve(parse_address(entry)) if is_name(parse_address(entry)) else (entry,)
        except OSError as error:
            found.append(Reached(entry, f"the name cannot be resolved: {error.strerror or error}"))
        else:
            found += (reach(address, keys, allow_list) for address in addresses)
    return tuple(found)


def reach(router: str, keys: str | None, allow_list: str | None) -> Reached:
    """Connect to the router's port for nodes, read the first byte that a ZeroMQ socket sends, and try the key."""
    address = parse_address(router)
    assert address.port is not None, router
    try:
        with socket.create_connection((address.host, address.port), timeout=_CONNECT_S) as link:
            mtu = link.getsockopt(socket.IPPROTO_IP, _IP_MTU) if link.family == socket.AF_INET else None
            first = b""
            with suppress(OSError):
                first = link.recv(1)
    except OSError as error:
        return Reached(router, error.strerror or str(error) or type(error).__name__)
    if first != _SIGNATURE:
        return Reached(router, "what listens there does not greet as a router's does", mtu)
    return Reached(router, "", mtu, _tried(router, keys, allow_list))


def _tried(
    router: str, keys: str | None, allow_list: str | None
) -> Literal["taken", "refused", "unanswered", "untried"]:
    """Return how a handshake ends. The router hears nothing else from this host, so no node joins it."""
    try:
        pair = KeyPair.configured(ProcessConfig(keys=keys, allow_list=allow_list))
        link = Link(router, "baton-doctor", new_epoch(), pair)
    except ConfigError:  # of the key files, which have a check of their own, or of an address that needs a key
        return "untried"
    try:
        until = time.monotonic() + _CONNECT_S
        while time.monotonic() < until:
            link.receive()
            if link.outlook in ("connected", "refused"):
                return "taken" if link.outlook == "connected" else "refused"
            time.sleep(_LOOK_S)
        return "unanswered"
    finally:
        link.close()
