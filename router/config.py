"""Configuration of the router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..metadata.config import ProcessConfig, at_least, setting
from ..metadata.errors import ConfigError
from .http.origin import allowed_hosts, allowed_origins


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    """Addresses, keys and limits of the router."""

    host: str = setting("127.0.0.1", "address of the HTTP server")
    port: int = setting(8000, "port of the HTTP server; 0: any free one")
    node_address: str = setting("tcp://127.0.0.1:5700", "address on which nodes join", metavar="tcp://HOST:PORT")
    api_key: str | None = setting(None, "key that clients must send as a bearer token (default: $BATON_API_KEY)")
    api_keys: str | None = setting(None, "file with more such keys, one a line", metavar="FILE")
    admin_key: str | None = setting(
        None, "key for /admin and /debug (default: $BATON_ADMIN_KEY); without one they are open on loopback alone"
    )
    allow_origin: tuple[str, ...] = setting(
        (),
        "origin of web pages that may use this server, like https://chat.example; give it once for each. With * any "
        "page that a user of this server visits can use it as that user can",
        metavar="ORIGIN",
    )
    allow_host: tuple[str, ...] = setting(
        (),
        "name under which clients may address this server while it is on loopback and has no API key, beside "
        "localhost; give it once for each. With * a page that has its own name resolved to loopback can use it",
        metavar="HOST",
    )
    max_concurrent_per_key: int | None = setting(None, "sequences (prompts times n) under way at once for an API key")
    max_waiting: int = setting(1024, "requests that may wait for room; above it clients get 429")
    max_waiting_tokens: int = setting(4 << 20, "prompt tokens that may wait for room; above it clients get 429")
    max_queue_s: float = setting(60.0, "how long a request may wait for room; who would wait longer gets 429")
    max_body_bytes: int = setting(8 << 20, "largest request body")
    max_unread_bytes: int = setting(1 << 20, "output that a client may leave unread before its request is paused")
    max_unread_s: float = setting(30.0, "how long a client may leave output unread before it is cut off")
    request_timeout_s: float = setting(3600.0, "longest life of a request")
    drain_timeout_s: float = setting(10.0, "seconds that SIGTERM leaves running requests to finish")
    max_attempts: int = setting(4, "how often a request is tried when nodes fail under it")
    node_wait_s: float = setting(
        10.0, "how long requests wait for a node when none is left that can take them, before they end in an error"
    )
    canary_interval_s: float = setting(30.0, "a pair of nodes without traffic for so long gets a canary request")

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")
        at_least(self, "drain_timeout_s", 0)
        at_least(self, "node_wait_s", 0)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be in 0..65535")
        for name in ("api_key", "admin_key"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty; leave it out to serve without a key")
        allowed_origins(self.allow_origin)
        allowed_hosts(self.allow_host)

    @property
    def client_keys(self) -> list[str]:
        """All keys that clients may send: `api_key` and those of the file. Raises ConfigError if the file cannot be
        read or holds no key."""
        keys = [self.api_key] if self.api_key is not None else []
        return keys if self.api_keys is None else [*keys, *_read_keys(self.api_keys)]


def _read_keys(path: str) -> list[str]:
    """Return one key per line. Empty lines and lines that begin with # are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys {path}: cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"api_keys {path}: holds no key; write one key per line")
    return keys


_POSITIVE = (
    "max_concurrent_per_key",
    "max_waiting",
    "max_waiting_tokens",
    "max_queue_s",
    "max_body_bytes",
    "max_unread_bytes",
    "max_unread_s",
    "request_timeout_s",
    "max_attempts",
    "canary_interval_s",
)
