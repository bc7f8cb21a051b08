"""The plan of `baton up`: the processes to start, with their configurations, threads, GPUs, ports and keys."""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ..decode_node.config import DecodeConfig
from ..engine.checkpoint.model_check import check_memory, check_model, fetched, resolve_model, stored_size
from ..engine.config import MEMORY_SHARE, EngineConfig
from ..engine.drafters.algorithm import find_drafter, settle
from ..engine.drafters.registry import describe
from ..engine.gpus import lacks_cuda, visible_gpus
from ..metadata.bus.allow_list import ROUTER, ROUTER_PREFIX, add_line, line_of
from ..metadata.bus.curve import KeyPair
from ..metadata.config import ProcessConfig, at_least, setting
from ..metadata.errors import ConfigError
from ..metadata.wire.node_info import Role
from ..prefill_node.config import PrefillConfig
from ..router.config import RouterConfig
from ..router.origins import is_loopback
from .child import Command
from .flags import resolve, to_argv, to_environ

_Process = TypeVar("_Process", bound=ProcessConfig)
_Node = TypeVar("_Node", bound=EngineConfig)
LOOPBACK = "127.0.0.1"

# Settings that `baton up` decides itself. They are not among its flags.
DECIDED = frozenset(
    {"router", "node_address", "node_id", "bind_host", "kv_events", "drain_timeout_s", "allow_list", "expect"}
)
_ALLOW_LIST = "allow-list"
_COMPILED = "*.nbi"  # what numba calls the index of a compiled kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Settings of the launcher alone. `baton up` also takes those of the router and the nodes."""

    routers: int = setting(1, "start this many routers, which share the nodes, at ports one after the other")
    prefill: int = setting(1, "start this many prefill nodes; with 0, decode nodes compute prompts, too")
    decode: int = setting(1, "start this many decode nodes")
    prefill_tp: int | None = setting(None, "divide each prefill node among this many ranks (default: --tp)")
    decode_tp: int | None = setting(None, "divide each decode node among this many ranks (default: --tp)")
    prefill_dp_attention: int | None = setting(
        None, "serve each prefill node with this many ranks that have prompts of their own (default: --dp-attention)"
    )
    decode_dp_attention: int | None = setting(
        None, "serve each decode node with this many ranks that have sequences of their own (default: --dp-attention)"
    )
    run_dir: str | None = setting(
        None, "write the logs to this directory (default: a new one under ~/.cache/baton/runs)", metavar="DIR"
    )
    ready_timeout_s: float = setting(600.0, "stop with an error if no request has succeeded after this many seconds")
    stop_timeout_s: float = setting(5.0, "after Ctrl-C, give running requests this many seconds to finish")

    def __post_init__(self) -> None:
        for name in ("prefill_tp", "decode_tp", "prefill_dp_attention", "decode_dp_attention"):
            at_least(self, name, 1)
        at_least(self, "ready_timeout_s", 0)
        at_least(self, "stop_timeout_s", 0)
        if not 1 <= self.routers <= 16:
            raise ConfigError(f"--routers {self.routers}: must be 1 to 16")
        if not 0 <= self.prefill <= 64:
            raise ConfigError(f"--prefill {self.prefill}: must be 0 to 64")
        if not 1 <= self.decode <= 64:
            raise ConfigError(f"--decode {self.decode}: must be 1 to 64, since only decode nodes generate")
        for kind, size in (("tp", self.prefill_tp), ("dp-attention", self.prefill_dp_attention)):
            if self.prefill == 0 and (size or 1) > 1:
                raise ConfigError(
                    f"--prefill-{kind} {size}: with --prefill 0 no prefill node starts; use --decode-{kind} {size} for "
                    "the decode nodes, which compute prompts, too, or start a node with --prefill 1"
                )


@dataclass(frozen=True, slots=True)
class Plan:
    """The configuration in effect for `baton up`, by TOML table."""

    up: UpConfig
    router: RouterConfig
    prefill: PrefillConfig
    decode: DecodeConfig
    keys_dir: Path | None = None  # holds NAME.key for each process and the allow-list

    def check_devices(self) -> None:
        """Raise ConfigError if a node is to run on a GPU and this host has none."""
        if any(config.device == "cuda" for config in self._nodes) and lacks_cuda():
            raise ConfigError("--device cuda: torch sees no CUDA device on this host; use --device cpu or auto")

    def fetched(self, say: Callable[[str], None]) -> Plan:
        """Return this plan with directories in place of names of the Hugging Face hub, after downloading the models.
        Raises ConfigError and ModelError."""
        found: dict[EngineConfig, Any] = dict(zip(self._nodes, fetched(self._nodes, say), strict=True))
        return replace(self, prefill=found.get(self.prefill, self.prefill), decode=found[self.decode])

    def check_models(self) -> None:
        """Raise ConfigError or ModelError if a process could not load its model."""
        checked: list[tuple[Any, ...]] = []
        for config in self._nodes:
            what = tuple(getattr(config, field.name) for field in fields(EngineConfig))
            if what not in checked:
                check_model(config)
                checked.append(what)
        check_memory([(config, stored_size(config)) for config in self._nodes])

    @property
    def _nodes(self) -> list[EngineConfig]:
        """The configuration of each node."""
        return [*[self.prefill] * self.up.prefill, *[self.decode] * self.up.decode]

    def settled(self) -> Plan:
        """Return this plan with `auto` speculation replaced by the drafter found. Raises ModelError and ConfigError."""
        prefill, decode = (settle(config, resolve_model(config.model)) for config in (self.prefill, self.decode))
        return replace(self, prefill=prefill, decode=decode)

    @property
    def speculation(self) -> str:
        """A description of how decode nodes will speculate."""
        config, model_dir = self.decode, resolve_model(self.decode.model)
        drafter = find_drafter(config, model_dir)
        return describe(config.speculative, config.draft_steps, config.draft_topk, drafter, model_dir)

    def watched(self) -> Plan:
        """Return this plan with an admin key, if only a caller with one can watch the router."""
        if self.router.admin_key is not None or is_loopback(self.router.host):
            return self
        return replace(self, router=replace(self.router, admin_key=secrets.token_urlsafe()))

    def secured(self, run_dir: Path) -> Plan:
        """Return this plan with a new key per process and an allow-list: no other process on this host can then join.

        The keys lie in a new directory below `run_dir`, which the caller deletes. If keys are configured, those are
        used.
        """
        if self.router.keys or self.prefill.keys or self.decode.keys:
            return self
        keys_dir = run_dir / f"keys-{os.getpid()}"
        shutil.rmtree(keys_dir, ignore_errors=True)
        keys_dir.mkdir(mode=0o700)
        for name in (*self.router_names, *self.node_names("prefill"), *self.node_names("decode")):
            keys = KeyPair.create(keys_dir / f"{name}.key")
            add_line(keys_dir / _ALLOW_LIST, line_of(name, keys.public))
        return replace(self, keys_dir=keys_dir)

    @property
    def router_names(self) -> list[str]:
        """The names of the routers."""
        return [ROUTER] if self.up.routers == 1 else [f"{ROUTER_PREFIX}{index}" for index in range(self.up.routers)]

    def node_names(self, role: Role) -> list[str]:
        """Return the names of the nodes of a role."""
        return [f"{role}-{index}" for index in range(getattr(self.up, role))]

    def keyed(self, config: _Process, name: str) -> _Process:
        """Return a process's configuration with the key made for it, if `secured` made one."""
        if self.keys_dir is None:
            return config
        return replace(config, keys=str(self.keys_dir / f"{name}.key"), allow_list=str(self.keys_dir / _ALLOW_LIST))

    @property
    def advice(self) -> str | None:
        """A sentence if another number of nodes would serve better on the GPUs of this host; None otherwise."""
        if not self.up.prefill or not self._may_use_gpus or len(visible_gpus()) != 1:
            return None
        num_nodes = self.up.prefill + self.up.decode
        return (
            f"all {num_nodes} nodes share one GPU: it holds the weights {num_nodes} times, and prompts delay streams "
            "all the same; --prefill 0 --decode 1 holds them once, leaves the memory to the KV cache, and bounds the "
            "delay (--max-gap-ms)"
        )

    @property
    def first_start(self) -> str | None:
        """A sentence if no compiled kernels are kept from an earlier start; None otherwise."""
        of_gpus = self._may_use_gpus and bool(visible_gpus())
        kept = "*" if of_gpus else _COMPILED
        if any(next(folder.rglob(kept), None) for folder in kernel_folders(os.environ, of_gpus=of_gpus)):
            return None
        return "compiling kernels, first start only: this takes a minute or more; later starts take seconds"

    @property
    def _may_use_gpus(self) -> bool:
        return "cpu" not in (self.prefill.device, self.decode.device)

    @property
    def num_gpus_to_plan(self) -> int:
        """Number of GPUs of this host if `baton plan` knows shapes of them: two to eight, one for each node. Else 0."""
        num_gpus, num_ranks = len(visible_gpus()), max(self.prefill.num_ranks, self.decode.num_ranks)
        return num_gpus if self._may_use_gpus and num_ranks == 1 and 2 <= num_gpus <= 8 else 0

    def tables(self) -> dict[str, Any]:
        """Return the configurations by the name of their TOML table."""
        return {"up": self.up, "router": self.router, "prefill": self.prefill, "decode": self.decode}


def kernel_folders(environ: Mapping[str, str], *, of_gpus: bool) -> list[Path]:
    """Return where Triton keeps compiled kernels, or numba those of the CPU: in the first folder that it may write."""
    if of_gpus:
        home = Path(environ.get("TRITON_HOME") or Path.home())
        return [Path(environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")]
    if own := environ.get("NUMBA_CACHE_DIR"):
        return [Path(own)]
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [Path(__file__).parents[1] / "kernels", cache / "numba"]


def make_plan(args: argparse.Namespace, tables: Mapping[str, Any], environ: Mapping[str, str]) -> Plan:
    """Combine flags, TOML tables and environment into the plan.

    A flag or a key of [up] applies to every process that has the setting. [router], [prefill] and [decode] each apply
    to their own process, and win over [up]. Raises ConfigError.
    """
    everyone = tables.get("up", {})

    def table(name: str) -> dict[str, Any]:
        return {**everyone, **tables.get(name, {})}

    up = resolve(UpConfig, args, everyone, environ)
    prefill = resolve(PrefillConfig, args, table("prefill"), environ)
    decode = resolve(DecodeConfig, args, table("decode"), environ)
    return Plan(
        up=up,
        router=resolve(RouterConfig, args, table("router"), environ),
        prefill=_ranked(prefill, "prefill", up.prefill_tp, up.prefill_dp_attention),
        decode=_ranked(decode, "decode", up.decode_tp, up.decode_dp_attention),
    )


def _ranked(config: _Node, role: Role, tp: int | None, dp_attention: int | None) -> _Node:
    """Return the configuration of nodes of a role with these numbers of ranks. None: as it is. Raises ConfigError if
    they are of both kinds."""
    tp, dp_attention = tp or config.tp, dp_attention or config.dp_attention
    if tp > 1 and dp_attention > 1:
        raise ConfigError(
            f"{role} nodes would have both --tp {tp} and --dp-attention {dp_attention}: ranks have either some heads "
            f"of all sequences or all heads of some sequences; add --{role}-tp 1 or --{role}-dp-attention 1"
        )
    return replace(config, tp=tp, dp_attention=dp_attention)


def _router_commands(plan: Plan, addresses: Sequence[str], http_port: int) -> list[Command]:
    """Return the commands of the routers, which listen for nodes at these addresses. Raises ConfigError if two would
    listen at one address."""
    if len(addresses) > 1 and plan.router.ops_address is not None:
        raise ConfigError(
            f"--ops-address {plan.router.ops_address}: each of --routers {len(addresses)} would listen there; leave it "
            "out, and read /metrics with the admin key"
        )
    router = replace(
        plan.router,
        drain_timeout_s=plan.up.stop_timeout_s,
        expect=f"prefill={plan.up.prefill},decode={plan.up.decode}",
        local_prefill="always" if plan.up.prefill == 0 else plan.router.local_prefill,
        cache_secret=plan.router.cache_secret or (secrets.token_urlsafe() if len(addresses) > 1 else None),
    )
    made: list[Command] = []
    for index, (name, address) in enumerate(zip(plan.router_names, addresses, strict=True)):
        config = replace(plan.keyed(router, name), port=http_port + index, node_address=address)
        made.append(Command(name, "router", _argv("router", config), to_environ(config)))
    return made


def commands(plan: Plan, node_port: int, http_port: int) -> list[Command]:
    """Return the commands of the routers, which come first, and of the nodes.

    `node_port`: the loopback port at which the nodes connect to the first router; the next router has the next port, as
    with `http_port`. Raises ConfigError if nodes on one GPU are given more than its memory, or if routers would listen
    at one address.
    """
    addresses = [f"tcp://{LOOPBACK}:{node_port + index}" for index in range(plan.up.routers)]
    address, drain = ",".join(addresses), plan.up.stop_timeout_s
    made = _router_commands(plan, addresses, http_port)
    num_processes = plan.up.prefill * plan.prefill.num_ranks, plan.up.decode * plan.decode.num_ranks
    threads = split_threads(len(os.sched_getaffinity(0)), *num_processes)
    gpus = visible_gpus()
    shares = [plan.prefill.memory_share] * plan.up.prefill + [plan.decode.memory_share] * plan.up.decode
    places = gpu_places(gpus, [plan.prefill.num_ranks] * plan.up.prefill + [plan.decode.num_ranks] * plan.up.decode)
    roles: tuple[tuple[Role, PrefillConfig | DecodeConfig], ...] = (("prefill", plan.prefill), ("decode", plan.decode))
    for role, config in roles:
        for name in plan.node_names(role):
            num_threads = config.threads or threads[role]
            node = replace(
                plan.keyed(config, name),
                router=address,
                node_id=name,
                bind_host=LOOPBACK,
                drain_timeout_s=drain,
                model=str(resolve_model(config.model).resolve()),
                threads=num_threads,
            )
            if isinstance(node, DecodeConfig) and plan.up.prefill and plan.router.local_prefill == "never":
                node = replace(node, expect_prompts=False)
            environ = {"OMP_NUM_THREADS": str(num_threads)}
            if gpus and config.device != "cpu":
                own = places[len(made) - plan.up.routers]
                sharing = [share for share, there in zip(shares, places, strict=True) if not own.isdisjoint(there)]
                node = replace(node, memory_share=memory_share(config.memory_share, sharing))
                if len(gpus) > 1:
                    environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for gpu in gpus if gpu in own)
            made.append(Command(name, role, _argv(role, node), environ))
    return made


def _argv(role: str, config: Any) -> list[str]:
    # -P: a folder named torch/ in the current directory must not be imported
    return [sys.executable, "-P", "-m", "baton.deploy.cli", role, *to_argv(config)]


def gpu_places(gpus: Sequence[str], sizes: Sequence[int]) -> list[set[str]]:
    """Return the GPUs of each node, given its number of ranks: nodes take GPUs in turn, one per rank. A node with more
    ranks than there are GPUs gets all of them, and refuses in words."""
    turn = itertools.cycle(gpus)
    return [set(itertools.islice(turn, min(size, len(gpus)))) for size in sizes]


def split_threads(num_cores: int, num_prefill: int, num_decode: int) -> dict[str, int]:
    """Return the CPU threads of one process of prefill and one of decode nodes, given their numbers. From four cores
    on, one is left to the router."""
    cores = num_cores - 1 if num_cores >= 4 else num_cores
    prefill = max(1, cores // (num_prefill + num_decode))
    decode = max(1, (cores - prefill * num_prefill) // num_decode)
    return {"prefill": prefill, "decode": decode}


def memory_share(own: float | None, sharing: Sequence[float | None]) -> float:
    """Return the share of a GPU's memory that a node takes: its `own` if one is given, else an equal part of the rest.
    `sharing`: the given shares of all nodes of the GPU. Raises ConfigError if there is no rest."""
    given = [each for each in sharing if each is not None]
    total, num_others = round(sum(given), 4), len(sharing) - len(given)
    left = round(MEMORY_SHARE - total, 4)
    if total > 1 or (num_others and left <= 0):
        raise ConfigError(
            f"--memory-share is {', '.join(map(str, given))} for {len(given)} of {len(sharing)} nodes of one GPU: "
            f"let the shares of all sum to {MEMORY_SHARE}, or leave them out"
        )
    return own if own is not None else round(left / num_others, 4)


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if no server can listen at host:port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    except OverflowError:
        raise ConfigError(f"--port {port}: must be 0 to 65535") from None
    except OSError as error:
        raise ConfigError(f"port {port} on {host} is taken or not allowed ({error.strerror}): use --port") from None


def free_port(host: str = LOOPBACK, count: int = 1) -> int:
    """Return the first of `count` successive ports on which nothing listens right now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        with ExitStack() as held:
            probe = held.enter_context(socket.socket(family))
            probe.bind((host, 0))
            first: int = probe.getsockname()[1]
            with suppress(OSError, OverflowError):  # one is taken, or beyond the last: try others
                for port in range(first + 1, first + count):
                    held.enter_context(socket.socket(family)).bind((host, port))
                return first
