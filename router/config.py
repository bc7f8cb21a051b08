"""Configuration of the router."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..metadata.config import ProcessConfig, at_least, setting
from ..metadata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    """Where the router listens, and its bounds."""

    host: str = setting("127.0.0.1", "address of the HTTP server")
    port: int = setting(8000, "port of the HTTP server; 0: any free one")
    node_address: str = setting("tcp://127.0.0.1:5700", "address on which nodes join", metavar="tcp://HOST:PORT")
    api_key: str | None = setting(None, "key that clients must send as a bearer token (default: $BATON_API_KEY)")
    max_waiting: int = setting(1024, "requests that may wait for room; above it clients get 429")
    max_body_bytes: int = setting(8 << 20, "largest request body")
    max_unread_bytes: int = setting(8 << 20, "output a client may leave unread before its request is cancelled")
    request_timeout_s: float = setting(3600.0, "longest life of a request")
    drain_timeout_s: float = setting(10.0, "seconds that SIGTERM leaves running requests to finish")
    max_attempts: int = setting(4, "how often a request is tried when nodes fail under it")
    node_wait_s: float = setting(
        10.0, "how long requests wait for a node when none is left that can take them, before they end in an error"
    )
    canary_interval_s: float = setting(30.0, "a pair of nodes without traffic for so long gets a canary request")

    def __post_init__(self) -> None:
        positive = ("max_waiting", "max_body_bytes", "max_unread_bytes", "request_timeout_s", "max_attempts")
        for name in (*positive, "canary_interval_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        at_least(self, "drain_timeout_s", 0)
        at_least(self, "node_wait_s", 0)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be in 0..65535")
        if self.api_key == "":
            raise ConfigError("api_key is empty; leave it out to serve without a key")

    @property
    def required_key(self) -> str | None:
        """The key that clients must send: the configured one, else the environment's."""
        return self.api_key or os.environ.get("BATON_API_KEY") or None
