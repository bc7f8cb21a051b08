"""The cluster of the chaos tests with each process on a host of its own (tests/support/hosts)."""

from __future__ import annotations

import http.client
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster import Cluster
from forked import HOST
from host_cluster import ANY, DATA_PORT, HTTP_PORT, NODE_PORT, ConnectionOfHost
from network import Network
from partition import Weather
from rig import NODES, ROUTERS, Rig, role_of
from switch import Conditions

TRANSPORTS = ("aes", "zmq", "plain", "nixl")
_PLAIN = ("plain", "nixl")  # those that need --plain-pages
_CONDITIONS: dict[Weather, Conditions] = {
    "fair": Conditions(),
    "slow": Conditions(delay_s=0.1, rate=1e6),
    "lossy": Conditions(loss=0.1, reorder=0.1),
    "cut": Conditions(is_cut=True),
    "hole": Conditions(mtu=200),
}


def flags_of(transport: str) -> list[str]:
    """Return the flags of nodes that move pages by this transport between hosts."""
    return ["--transport", transport, *(["--plain-pages"] if transport in _PLAIN else [])]


class HostRig(Rig):
    """Routers and nodes, each on the host of its name. All have one key, and lend to other hosts."""

    def __init__(self, directory: Path, model: Path, flags: list[str], *, num_routers: int = 1, **more: Any) -> None:
        """Arguments as those of `Rig`. Raises OSError if the kernel allows no such hosts."""
        self.network = Network(directory / "network", (*ROUTERS[:num_routers], *more.get("nodes", NODES)))
        super().__init__(directory, model, flags, num_routers=num_routers, **{**more, "has_keys": True})

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        return ConnectionOfHost(self.network, ROUTERS[0], "127.0.0.1", HTTP_PORT, timeout_s)

    def end(self) -> None:
        super().end()
        self.network.close()

    def abandon(self) -> None:
        super().abandon()
        self.network.close()

    def environ(self, name: str) -> dict[str, str]:
        return super().environ(name) | {HOST: ":".join(self.network.namespaces_of(name))}

    def idle_lines(self) -> list[tuple[str, ...]]:
        """Return the ways between nodes of unlike roles, or a node and a router, on which nothing has gone yet."""
        return [ends for ends in self.lines if len({*map(role_of, ends)}) == 2 and not self.lines[ends].num_connections]

    def _new_door(self, name: str) -> Cluster:
        return _Door(self, name)

    def _open_lines(self, seed: int) -> Any:
        return _Ways(self.network)

    def _addresses(self, name: str) -> list[str]:
        if name in self.doors:
            return ["--port", str(HTTP_PORT), "--node-address", f"tcp://{ANY['ipv4']}:{NODE_PORT}"]
        routers = ",".join(f"tcp://{each}:{NODE_PORT}" for each in self.doors)
        return ["--router", routers, "--bind-host", f"tcp://{self.network.address(name)}:{DATA_PORT}"]

    def _redirected(self, name: str) -> dict[str, str]:
        return {}


class _Door(Cluster):
    """A further router of a rig."""

    def __init__(self, rig: HostRig, name: str) -> None:
        super().__init__(rig.directory, rig.model, is_forked=True)
        self.network, self.name = rig.network, name

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection to the router from a client on its host."""
        return ConnectionOfHost(self.network, self.name, "127.0.0.1", HTTP_PORT, timeout_s)


class _Way:
    """What goes from one host to another one."""

    def __init__(self, network: Network, ends: tuple[str, str]) -> None:
        self._network, self._ends = network, ends
        self._weather: Weather = "fair"

    @property
    def num_connections(self) -> int:
        """More than 0 if something has gone this way."""
        return self._network.num_forwarded(*self._ends)

    @property
    def weather(self) -> Weather:
        return self._weather

    @weather.setter
    def weather(self, value: Weather) -> None:
        self._weather = value
        self._network.set(*self._ends, _CONDITIONS[value])


class _Ways:
    """The ways between hosts, but for those between routers, as `Rig` uses lines."""

    def __init__(self, network: Network) -> None:
        self._network = network
        pairs = itertools.permutations(network.hosts, 2)
        self._ways = {ends: _Way(network, ends) for ends in pairs if not {*ends} <= {*ROUTERS}}

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._ways)

    def __getitem__(self, ends: tuple[str, str]) -> _Way:
        return self._ways[ends]

    def clear(self) -> None:
        """Set fair weather on all ways."""
        for way in self._ways.values():
            way.weather = "fair"

    def close(self) -> None:
        """Do nothing: the rig closes the network."""
