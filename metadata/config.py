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
        "file with this process's CURVE key pair, or one for the whole cluster (see `baton keys`); required on other "
        "than loopback",
        metavar="FILE",
    )
    allow_list: str | None = setting(
        None,
        "file with the names and public keys of all processes that may connect, if each has its own --keys; without "
        "it, all have the same key",
        metavar="FILE",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least severe level logged")
    log_json: bool = setting(False, "log one JSON object per line instead of text")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(ProcessConfig):
    """Settings of every node: how it meets the router and other nodes."""

    router: str = setting("tcp://127.0.0.1:5700", "the router's address for nodes", metavar="tcp://HOST:PORT")
    node_id: str | None = setting(None, "name of this node, unique in the cluster (default: role-host-pid)")
    bind_host: str = setting("127.0.0.1", "address on which a prefill node serves pages; others must reach it")
    transport: Literal["auto", "cuda", "local", "zmq"] = setting(
        "auto",
        "how pages travel: cuda (between GPUs of one host), local (shared memory, one host), zmq (anywhere), "
        "auto (the first of them that both nodes can use)",
    )
    checksums: bool = setting(True, "check every page after its transfer")
    drain_timeout_s: float = setting(30.0, "seconds that SIGTERM leaves running requests to finish")

    def __post_init__(self) -> None:
        at_least(self, "drain_timeout_s", 0)
        if self.node_id == "":
            raise ConfigError("node_id is empty; give a name, or leave it out for a generated one")
