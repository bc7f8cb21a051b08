"""Addresses of sockets: `tcp://HOST:PORT` and `ipc://PATH`, whether other machines can reach them, and the identity of
this host."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import ConfigError

if TYPE_CHECKING:
    from .curve import KeyPair

_TCP = re.compile(r"tcp://(\[(?P<ipv6>[0-9A-Fa-f:.]+(%\w+)?)\]|(?P<host>[A-Za-z0-9_.*-]+)):(?P<port>\d{1,5}|\*)")
_HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:\[\]]+):(\d{1,5}|\*)")
PAGE_PORTS = 500
_MAX_PORT = 65535
_MAX_IPC_PATH = 100  # sockaddr_un holds 107 bytes


@dataclass(frozen=True, slots=True)
class Address:
    """One parsed address. `host` has no brackets. `port` None means any free port. Both are unset for ipc."""

    scheme: Literal["tcp", "ipc"]
    host: str = ""
    port: int | None = None
    path: str = ""

    @property
    def is_loopback(self) -> bool:
        """True if no other machine can connect: 127.0.0.0/8, ::1, localhost, ipc."""
        if self.scheme == "ipc" or self.host.lower() in {"localhost", "localhost."}:
            return True
        literal = _ip_literal(self.host)
        return literal is not None and literal.is_loopback

    @property
    def needs_ipv6(self) -> bool:
        """True for an IPv6 literal, and for a name that resolves to IPv6 addresses only."""
        literal = _ip_literal(self.host)
        if literal is not None:
            return literal.version == 6
        return self.scheme == "tcp" and self.host != "*" and _resolves_to_ipv6_only(self.host)

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{'*' if self.port is None else self.port}"


def parse_address(text: str) -> Address:
    """Parse `tcp://HOST:PORT` (port 0 or `*`: any free one) or `ipc://PATH`. Raises ConfigError naming the address."""
    if text.startswith("ipc://"):
        path = text.removeprefix("ipc://")
        if not path or "\0" in path or len(os.fsencode(path)) > _MAX_IPC_PATH:
            raise ConfigError(f"address {text!r}: ipc:// takes a path of 1 to {_MAX_IPC_PATH} bytes")
        return Address("ipc", path=path)
    match = _TCP.fullmatch(text)
    if match is None:
        hint = f"; write tcp://{text}" if _HOST_AND_PORT.fullmatch(text) else ""
        if text.startswith(("http://", "https://")):
            hint = ": that is for clients; nodes connect to the router's node_address, like tcp://HOST:5700"
        raise ConfigError(f"address {text!r} is neither tcp://HOST:PORT nor ipc://PATH{hint}")
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > _MAX_PORT:
        raise ConfigError(f"address {text!r}: port {port} is above {_MAX_PORT}")
    host = match["ipv6"] or match["host"]
    if match["ipv6"] and _ip_literal(host) is None:
        raise ConfigError(f"address {text!r}: [{host}] is not an IPv6 address")
    return Address("tcp", host=host, port=port or None)


def require_keys(address: str, keys: KeyPair | None) -> None:
    """Raise ConfigError if other machines can reach `address` and there are no keys."""
    if keys is None and not parse_address(address).is_loopback:
        raise ConfigError(
            f"address {address} is not on loopback, so connections need CURVE keys: make them with `baton keys FILE`, "
            "give each process its own with --keys FILE --allow-list LIST, or all the same with --keys, or stay on "
            "127.0.0.1"
        )


def any_port_of(host: str) -> str:
    """Return the address with which a socket binds to any free port of a host, or to the port of HOST:PORT. A full
    address is returned unchanged."""
    if "://" in host:
        return host
    if _HOST_AND_PORT.fullmatch(host):
        return f"tcp://{host}"
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{bracketed}:*"


def address_of_rank(host: str, rank: int) -> str:
    """Return where a rank of a node binds, if rank 0 binds at `host`: a host name or an address. Ranks above 0 use the
    ports, or paths, behind that of rank 0; any free port stays any free port. Raises ConfigError if the address is
    malformed, or if there is no such port."""
    if _HOST_AND_PORT.fullmatch(host):
        host = f"tcp://{host}"
    if rank == 0 or "://" not in host:
        return host
    address = parse_address(host)
    if address.scheme == "ipc":
        return f"{host}-{rank}"
    if address.port is None:
        return host
    port = address.port + rank
    if port > _MAX_PORT:
        raise ConfigError(
            f"address {host!r}: rank {rank} would listen at port {port}; use a port of at most {_MAX_PORT - rank}"
        )
    return str(replace(address, port=port))


def host_towards(address: str) -> str:
    """Return the address of this host from which it reaches `address`; that of loopback if there is no way, or if it is
    a path."""
    parsed = parse_address(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parsed.host, parsed.port or 1))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def page_port_of(address: str) -> str | None:
    """Return where a node that was told to listen at `address` for data links listens for pages: at any free port, or,
    if it was told the port, at the port PAGE_PORTS above. None: there is no such port, or the address is a path."""
    parsed = parse_address(address)
    port = None if parsed.port is None else parsed.port + PAGE_PORTS
    if parsed.scheme != "tcp" or (port or 0) > _MAX_PORT:
        return None
    return str(replace(parsed, port=port))


def host_identity() -> str:
    """Return a digest (32 hex digits) that is equal for two processes exactly if one may open the other's
    /proc/PID/fd/N: same boot of the same kernel, same user and group, same pid, mount and user namespaces. If the
    kernel does not tell these, the digest is random and equals no other."""
    try:
        parts = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            f"{os.geteuid()}:{os.getegid()}",
            *(str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("pid", "mnt", "user")),
        ]
    except OSError:
        parts = [os.urandom(16).hex()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def is_literal(host: str) -> bool:
    """Return whether a host is an IP address, not a name."""
    return _ip_literal(host) is not None


def _ip_literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _resolves_to_ipv6_only(host: str) -> bool:
    try:
        families = {entry[0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return families == {socket.AF_INET6}
