"""Configuration of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..metadata.config import ProcessConfig, at_least, setting
from ..metadata.errors import ConfigError
from ..metadata.wire.node_info import Role
from .keys import read_keys
from .nodes.prompt_role import LocalPrefill
from .origins import Authority, allowed_hosts, allowed_origins, is_header, trusted_networks
from .reasoning_parsers.registry import REASONING_PARSERS
from .tenants.fair_share import CacheScope
from .tool_parsers.registry import TOOL_PARSERS


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    """Addresses, keys and limits of the router."""

    host: str = setting(
        "127.0.0.1", "serve HTTP on this address; other hosts reach the router only if it is not loopback"
    )
    port: int = setting(8000, "serve HTTP on this port; 0 takes any free port")
    node_address: str = setting(
        "tcp://127.0.0.1:5700",
        "accept nodes on this address; give one that the hosts of the nodes can reach",
        metavar="tcp://HOST:PORT",
    )
    api_key: str | None = setting(
        None, "refuse clients that do not send this key as a bearer token (default: $BATON_API_KEY)"
    )
    api_keys: str | None = setting(
        None,
        "accept the API keys in this file too: lines of KEY, NAME KEY, NAME KEY TENANT or NAME KEY TENANT WEIGHT; it "
        "is read again when it changes",
        metavar="FILE",
    )
    trusted_proxy: tuple[str, ...] = setting(
        (),
        "believe what proxies at these addresses say of their clients, like 10.0.0.0/8; repeat the flag for each range",
        metavar="CIDR",
    )
    tenant_header: str | None = setting(
        None,
        "let a trusted proxy name the tenant of a request in this header, like X-Tenant, if the API key names none",
        metavar="NAME",
    )
    cache_scope: CacheScope = setting(
        "tenant", "share cached prefixes between the requests of a tenant, or only between those of one API key"
    )
    cache_secret: str | None = setting(
        None,
        "keep the caches of tenants apart by this secret (default: $BATON_CACHE_SECRET, else drawn at the start); "
        "routers that share nodes share prefixes if they have the same",
    )
    admin_key: str | None = setting(
        None,
        "ask for this key at /admin and /debug (default: $BATON_ADMIN_KEY); without a key, they are open if the "
        "router listens on loopback only, else closed",
    )
    allow_origin: tuple[str, ...] = setting(
        (),
        "let web pages of this origin, like https://chat.example, use the router; repeat the flag for each "
        "origin. * allows every web page that a user of this router visits",
        metavar="ORIGIN",
    )
    allow_host: tuple[str, ...] = setting(
        (),
        "serve clients that address the router by this name, while it is on loopback and has no API key; "
        "localhost is always served; repeat the flag for each name. * also serves web pages whose name resolves "
        "to loopback",
        metavar="HOST",
    )
    ops_address: str | None = setting(
        None,
        "serve /metrics, /health and /ready at this address too, without a key; a port alone is one of loopback",
        metavar="HOST:PORT",
    )
    metrics_names: Literal["baton", "vllm"] = setting(
        "baton", "name the metrics as Baton does; vllm adds those that dashboards and gateways read by vLLM's names"
    )
    expect: str | None = setting(
        None,
        "answer 503 at /ready until so many nodes have joined once, like prefill=1,decode=2",
        metavar="ROLE=N,...",
    )
    max_concurrent_per_key: int | None = setting(
        None,
        "run at most this many sequences (prompts times n) at once per API key; a client that asks for more gets "
        "429 (default: no limit)",
    )
    max_waiting: int = setting(1024, "let at most this many requests wait for free nodes; further ones get 429")
    max_waiting_tokens: int = setting(
        4 << 20, "let at most this many prompt tokens wait for free nodes; further requests get 429"
    )
    max_queue_s: float = setting(
        60.0, "let a request wait this many seconds for free nodes; a longer wait, even an expected one, ends with 429"
    )
    max_body_bytes: int = setting(8 << 20, "refuse request bodies with more bytes than this")
    max_unread_bytes: int = setting(
        1 << 20, "pause a request when its client has left this many bytes of output unread"
    )
    max_unread_s: float = setting(30.0, "close the connection of a client that reads nothing for this many seconds")
    request_timeout_s: float = setting(3600.0, "end a request with 504 after this many seconds, waiting included")
    drain_timeout_s: float = setting(10.0, "after SIGTERM, give running requests this many seconds to finish")
    max_attempts: int = setting(4, "end a request with an error after this many failed attempts in a row")
    node_wait_s: float = setting(
        10.0,
        "let requests wait this many seconds for a new node if no node is left that can take them, or none has joined "
        "since the router started; then end them with 503",
    )
    local_prefill: LocalPrefill = setting(
        "never",
        "let decode nodes compute prompts: never (only if no prefill node is there), always, or auto (those prompts "
        "whose first two tokens they bring sooner; --max-gap-ms of decode nodes bounds what that costs other streams)",
    )
    tool_parser: str | None = setting(
        None,
        "read tool calls in this format; none refuses tools (default: the format that the model's chat template shows)",
        choices=(*TOOL_PARSERS, "none"),
    )
    reasoning_parser: str | None = setting(
        None,
        "divide thoughts from answers in this format; none leaves thoughts in the text (default: the format that the "
        "model's chat template shows)",
        choices=(*REASONING_PARSERS, "none"),
    )
    reasoning_field: Literal["reasoning_content", "reasoning"] = setting(
        "reasoning_content", "give thoughts in this field of messages and deltas"
    )
    canary_interval_s: float = setting(
        30.0, "send a canary request to a pair of nodes that served nobody for this many seconds"
    )

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
        if self.cache_secret == "":
            raise ConfigError("cache_secret is empty; leave it out to have one drawn")
        _ = self.ops, self.expected
        trusted_networks(self.trusted_proxy)
        if self.tenant_header is not None and not is_header(self.tenant_header):
            raise ConfigError(f"tenant_header is {self.tenant_header!r}; it must be a header's name, like X-Tenant")
        if self.tenant_header is not None and not self.trusted_proxy:
            raise ConfigError("tenant_header is set, but no proxy is trusted: give --trusted-proxy CIDR as well")
        if self.host.startswith("[") and self.host.endswith("]"):  # as in a URL
            object.__setattr__(self, "host", self.host[1:-1])
        allowed_origins(self.allow_origin)
        allowed_hosts(self.allow_host)

    @property
    def ops(self) -> Authority | None:
        """Host and port of `ops_address`. Raises ConfigError."""
        if self.ops_address is None:
            return None
        given = self.ops_address
        given = f"127.0.0.1:{given.removeprefix(':')}" if given.removeprefix(":").isdecimal() else given
        found = Authority.parse(given)
        if found is None or found.port is None:
            raise ConfigError(f"ops_address is {self.ops_address}; it must be like 127.0.0.1:9090, or a port alone")
        return found

    @property
    def expected(self) -> dict[Role, int]:
        """The nodes that `expect` names, by role. Raises ConfigError."""
        counts: dict[Role, int] = {}
        for part in self.expect.split(",") if self.expect is not None else ():
            name, _, number = part.strip().partition("=")
            role = next((role for role in get_args(Role) if role == name.strip()), None)
            if role is None or role in counts or not number.strip().isdecimal():
                raise ConfigError(f"expect is {self.expect!r}; it must be like prefill=1,decode=2")
            counts[role] = int(number)
        return {role: count for role, count in counts.items() if count}

    @property
    def client_keys(self) -> list[str]:
        """All keys that clients may send: `api_key` and those of the file. Raises ConfigError if the file cannot be
        read or holds no key."""
        keys = [self.api_key] if self.api_key is not None else []
        return keys if self.api_keys is None else [*keys, *(each.key for each in read_keys(self.api_keys))]


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
