"""Configuration of `baton doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from ...metadata.bus.addresses import parse_address
from ...metadata.bus.router_addresses import router_entries
from ...metadata.config import setting
from ...metadata.errors import ConfigError
from ...router.config import RouterConfig

_ROUTER = RouterConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """Flags of `baton doctor`: what to look at besides this host. Those of other commands mean the same here."""

    model: str | None = setting(
        None, "check the Hugging Face checkpoint in this directory (default: the demo model)", metavar="DIR"
    )
    host: str = setting(_ROUTER.host, "check whether a router can serve HTTP on this address")
    port: int = setting(_ROUTER.port, "check whether a router can serve HTTP on this port; 0: any")
    node_address: str = setting(
        _ROUTER.node_address, "check whether a router can accept nodes on this address", metavar="tcp://HOST:PORT"
    )
    keys: str | None = setting(None, "check this key file", metavar="FILE")
    allow_list: str | None = setting(None, "check whether this allow-list names the key of --keys", metavar="FILE")
    api_keys: str | None = setting(None, "check this file of API keys", metavar="FILE")
    router: str | None = setting(
        None,
        "check whether a node on this host reaches a router's --node-address here; several, with commas between them",
        metavar="tcp://HOST:PORT",
    )
    cluster: bool = setting(
        False, "instead of this host, check a running router and its nodes, as the router sees them"
    )
    url: str = setting("http://127.0.0.1:8000", "with --cluster: where the router listens", metavar="URL")
    admin_key: str | None = setting(
        None, "with --cluster: the router's admin key, or in BATON_ADMIN_KEY", metavar="KEY"
    )
    api_key: str | None = setting(
        None, "with --cluster: its API key if it has no admin key, or in BATON_API_KEY", metavar="KEY"
    )
    json: bool = setting(False, "print the findings as JSON")
    log_level: str = setting("warning", "debug shows a traceback with an error")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: must be 0 to 65535")
        parse_address(self.node_address)
        for router in () if self.router is None else router_entries(self.router):
            if not parse_address(router).port:
                raise ConfigError(f"--router {router}: write it like tcp://ROUTER:5700")
