"""A cluster whose processes run on hosts of a network (network.py), each on the host of its name."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import Cluster, Process
from forked import HOST
from network import Family, Network

DEMO = Path(__file__).parents[3] / "deploy" / "demo"  # a small trained model
HOSTS = ("router", "prefill-0", "decode-0")
NODE_WAIT_S = 60.0  # longer than any fault, so no request fails for want of a node
HTTP_PORT, NODE_PORT, DATA_PORT = 8000, 5700, 7000
ANY: dict[Family, str] = {"ipv4": "0.0.0.0", "ipv6": "[::]"}


class HostCluster(Cluster):
    """A router and nodes of one model, which know each other by names. `keys`: the file of keys that all share."""

    ready_s = 120.0  # a lossy network may lose a handshake several times

    def __init__(self, directory: Path, model: Path | None, network: Network) -> None:
        super().__init__(directory, model, is_forked=True)
        self.network = network
        self.http_port, self.node_port = HTTP_PORT, NODE_PORT
        self.keys = directory / "cluster.key"
        self.nodes_wanted = [name for name in network.hosts if name.startswith(("prefill", "decode"))]
        self.network_of: dict[str, str] = {}  # by process: the host whose network it is in, if it is not its own
        self.node_flags: list[str] = []
        self.client_host, self.router_host = "router", "127.0.0.1"  # where clients run, and where they find the router

    @property
    def node_address(self) -> str:
        return f"tcp://router:{self.node_port}"

    def begin(self) -> HostCluster:
        """Start the router and a node on each other host. Wait until all are ready."""
        self.start_router()
        for name in self.nodes_wanted:
            self.start_wanted(name)
        self.wait_ready(num_nodes=len(self.nodes_wanted))
        return self

    def start_router(self, *flags: str) -> Process:
        address = f"tcp://{ANY[self.network.family]}:{self.node_port}"
        more = ["--keys", str(self.keys), "--node-wait-s", f"{NODE_WAIT_S:g}"]
        return self.start_process("router", "router", "--node-address", address, *more, *flags)

    def start_wanted(self, name: str) -> Process:
        """Start the node of a host."""
        role = name.partition("-")[0]
        where = ["--bind-host", f"{name}:{DATA_PORT}"] if role == "prefill" else []
        return self.start_node(role, name, "--keys", str(self.keys), *where, *self.node_flags)

    def environ(self, name: str) -> dict[str, str]:
        _, mounts = self.network.namespaces_of(name)
        network, _ = self.network.namespaces_of(self.network_of.get(name, name))
        return {HOST: f"{network}:{mounts}"}

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        return ConnectionOfHost(self.network, self.client_host, self.router_host, self.http_port, timeout_s)

    @contextmanager
    def restarted(self, *names: str) -> Iterator[None]:
        """Kill processes, and start them again after the block."""
        for name in names:
            self.processes[name].kill()
        yield
        for name in names:
            self.start_router() if name == "router" else self.start_wanted(name)


class ConnectionOfHost(http.client.HTTPConnection):
    """A connection from a host to a port of a host."""

    def __init__(self, network: Network, source: str, target: str, port: int, timeout_s: float) -> None:
        super().__init__(target, port, timeout=timeout_s)
        self._network, self._source = network, source

    def connect(self) -> None:
        with self._network.inside(self._source):
            super().connect()
