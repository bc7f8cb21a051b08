"""Configuration that every process shares. The flags and TOML keys are made from these fields (deploy/flags.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ConfigError


def setting(default: Any, text: str, **more: Any) -> Any:
    """Return a configuration field with its help text. `more` may hold `metavar` and `choices`."""
    metadata: Mapping[str, Any] = {"help": text, **more}
    return field(default=default, metadata=metadata)


def at_least(config: object, name: str, least: float) -> None:
    """Raise ConfigError if the field is set and smaller than `least`."""
    value = getattr(config, name)
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value}; it must be {least} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Settings of every process: logs and keys."""

    keys: str | None = setting(
        None,
        "encrypt and authenticate connections with the CURVE key pair in this file (see `baton keys`); needed if "
        "an address is not loopback",
        metavar="FILE",
    )
    allow_list: str | None = setting(
        None,
        "let only the processes in this file connect; it holds the name and public key of each (default: let all "
        "connect that have the same --keys)",
        metavar="FILE",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "log events of this severity and above")
    log_format: Literal["text", "json"] = setting("text", "log lines of text, or one JSON object per line")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(ProcessConfig):
    """Settings of every node: how it meets the router and other nodes."""

    router: str = setting(
        "tcp://127.0.0.1:5700",
        "join the router at this address, its --node-address; join all routers of a list with commas, and of a name "
        "that resolves to several addresses",
        metavar="tcp://HOST:PORT",
    )
    node_id: str | None = setting(
        None,
        "give this node a name, unique in the cluster (default: role-host-pid, in a container with random digits in "
        "place of the pid)",
    )
    bind_host: str = setting(
        "127.0.0.1",
        "serve KV pages on this address, which the hosts of the other nodes must reach; a decode node lends cached "
        "pages there. Of tcp://HOST:PORT, rank 1 takes the next port, and so on",
    )
    transport: Literal["auto", "cuda", "local", "plain", "aes", "zmq", "nixl"] = setting(
        "auto",
        "move KV pages by cuda (between GPUs of one host), local (shared memory of one host), plain (between any "
        "hosts, needs --plain-pages and --keys), aes (between any hosts, encrypted, needs --keys) or zmq (between any "
        "hosts, under CURVE if there are keys); auto takes the first of these that both nodes can use. nixl (between "
        "any hosts, needs --plain-pages and NIXL) is used only if both nodes name it",
    )
    plain_pages: bool = setting(
        False,
        "send KV pages to other hosts without encryption: whoever sees the network can read prompts. Pages are still "
        "authenticated by the --keys, and nobody can change one. Both nodes must say so",
    )
    shared_dir: str | None = setting(
        None,
        "share memory with nodes in other containers of this host through Unix sockets in this directory, which all of "
        "them mount (default: with nodes in the same network namespace, such as those of one pod)",
        metavar="DIR",
    )
    checksums: bool = setting(True, "check every KV page after its transfer; without it, damaged pages go unnoticed")
    kv_events: str | None = setting(
        None,
        "publish the pages of the prefix cache at this address for routers of other systems, in the format of vLLM's "
        "KV events; whoever reaches it reads all prompts (default: publish nothing)",
        metavar="tcp://HOST:PORT",
    )
    drain_timeout_s: float = setting(30.0, "after SIGTERM, give running requests this many seconds to finish")

    def __post_init__(self) -> None:
        at_least(self, "drain_timeout_s", 0)
        if self.node_id == "":
            raise ConfigError("node_id is empty; give a name, or leave it out for a generated one")
