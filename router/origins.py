"""Origins of web pages and names of hosts, as browsers write them and as operators allow them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from ..metadata.errors import ConfigError

Network = IPv4Network | IPv6Network

ANY = "*"  # allows every origin, or every host

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_NUM_KNOWN = 256  # hosts whose parts are remembered: most clients of a router name the same one
_DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_HOST = r"(\[[0-9a-f:.]+\]|[a-z0-9._~!$&'()+;=-]*)(?::([0-9]{0,5}))?"
_AUTHORITY = re.compile(_HOST)
_ORIGIN = re.compile(rf"([a-z][a-z0-9+.-]*)://{_HOST}")


class Authority(NamedTuple):
    """A host, in lower case and without brackets, and its port if one is given."""

    host: str
    port: int | None

    @classmethod
    @lru_cache(_NUM_KNOWN)
    def parse(cls, text: str) -> Authority | None:
        """Return the authority that a Host header names, None if it is malformed."""
        found = _AUTHORITY.fullmatch(text.strip().lower())
        return _authority(found[1], found[2]) if found is not None and found[1] else None


class Origin(NamedTuple):
    """The origin of a web page. `port` is None for the scheme's own port."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> Origin | None:
        """Return the origin that an Origin header names, None for `null` and for any text that is not one origin."""
        found = _ORIGIN.fullmatch(text.strip().lower())
        if found is None or (found[1] in _DEFAULT_PORTS and not found[2]):
            return None
        authority = _authority(found[2], found[3])
        return cls.of(found[1], authority) if authority is not None else None

    @classmethod
    def of(cls, scheme: str, authority: Authority) -> Origin:
        """Return the origin of the pages that an authority serves."""
        is_default = authority.port == _DEFAULT_PORTS.get(scheme, -1)
        return cls(scheme, authority.host, None if is_default else authority.port)


@lru_cache(_NUM_KNOWN)
def is_loopback(host: str) -> bool:
    """Return whether a host (from an Authority) is always this machine, whatever a name server answers."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_header(name: str) -> bool:
    """Return whether the text can be the name of a header."""
    return _HEADER.fullmatch(name) is not None


def trusted_networks(values: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks of --trusted-proxy. Raises ConfigError that names the value and the fix."""
    networks: list[Network] = []
    for value in values:
        try:
            networks.append(ip_network(value.strip(), strict=False))
        except ValueError:
            like = "it must be an address or a range of addresses, like 10.0.0.7 or 10.0.0.0/8"
            raise ConfigError(f"--trusted-proxy {value}: {like}; repeat the flag for each") from None
    return tuple(networks)


def is_trusted(peer: str | None, networks: Iterable[Network]) -> bool:
    """Return whether a connection from this address comes from one of the networks."""
    try:
        address = ip_address((peer or "").partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return any((mapped or address) in network or address in network for network in networks)


def allowed_origins(values: Iterable[str]) -> frozenset[Origin] | None:
    """Return the origins of --allow-origin, None for every one. Raises ConfigError that names the value and the fix."""
    origins: set[Origin] = set()
    allows_any = False
    for value in values:
        origin = Origin.parse(value)
        if value == ANY:
            allows_any = True
        elif origin is None:
            raise ConfigError(f"--allow-origin {value}: {_fault_of_origin(value)}")
        else:
            origins.add(origin)
    return None if allows_any else frozenset(origins)


def allowed_hosts(values: Iterable[str]) -> frozenset[str] | None:
    """Return the hosts of --allow-host, None for every host. Raises ConfigError that names the value and the fix."""
    hosts: set[str] = set()
    allows_any = False
    for value in values:
        is_bare = value.count(":") > 1 and not value.startswith("[")
        authority = Authority.parse(f"[{value}]" if is_bare else value)
        if value == ANY:
            allows_any = True
        elif authority is None or authority.port is not None or value.startswith("."):
            raise ConfigError(f"--allow-host {value}: {_fault_of_host(value)}")
        else:
            hosts.add(authority.host)
    return None if allows_any else frozenset(hosts)


def _authority(host: str, port: str | None) -> Authority | None:
    if host.startswith("["):
        try:
            host = str(IPv6Address(host[1:-1]))
        except ValueError:
            return None
    number = int(port) if port else None
    return None if number is not None and number > 65535 else Authority(host.removesuffix(".") or host, number)


def _fault_of_origin(value: str) -> str:
    like = "it must be like https://chat.example or http://localhost:3000"
    if value.strip().lower() == "null":
        return f"every sandboxed page and every local file has this origin; {like}, or {ANY} for all"
    if re.search(r"[,\s]", value.strip()):
        return f"this is more than one word; give the flag once for each origin, and {like}"
    if "*" in value:
        return f"a part of an origin cannot be {ANY}; give the flag once for each origin, or {ANY} alone for all"
    if "://" not in value:
        host = Authority.parse(value)
        scheme = "http" if host is not None and is_loopback(host.host) else "https"
        return f"the scheme is missing; write {scheme}://{value}" if host is not None else like
    scheme, _, rest = value.partition("://")
    alone = f"{scheme}://{re.split(r'[/?#]', rest)[0]}"
    if alone != value and Origin.parse(alone) is not None:
        return f"an origin ends before the path; write {alone}"
    return like


def _fault_of_host(value: str) -> str:
    like = "it must be a name or an address, like baton.example"
    if re.search(r"[,\s]", value.strip()):
        return f"this is more than one word; give the flag once for each host, and {like}"
    if "*" in value or value.startswith("."):
        return f"a part of a host cannot be {ANY}; give the flag once for each host, or {ANY} alone for all"
    alone = Authority.parse(re.split(r"[/?#]", value.split("://", 1)[-1])[0])
    if alone is not None:
        return f"a host has no scheme, port or path (all its ports are allowed); write {alone.host}"
    return like
