"""Facts about this host, read once. Reading changes nothing, needs no right of root, and has a time limit where another
process or host must answer. checks.py judges the facts."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from ...engine.checkpoint.model_check import check_memory, check_model, stored_size
from ...engine.config import EngineConfig
from ...engine.state.host_memory import available_memory
from ...metadata.bus.addresses import parse_address
from ...metadata.bus.curve import KeyPair
from ...metadata.config import ProcessConfig
from ...metadata.errors import BatonError
from ...metadata.version import package_version
from ...router.keys import read_keys
from ..up import LOOPBACK, check_port, kernel_folders
from .config import DoctorConfig
from .gpu_facts import GpuFacts, read_gpus
from .reach import Reached, reach_all

_DISTRIBUTION = "baton-serve"
_EXTRAS_OF_DEVELOPERS = frozenset({"browser", "test"})
_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[.*?\])?(?:>=([\d.]+))?[^;]*(?:;.*extra == ["']([\w-]+)["'])?""")
_BATON = ("baton", "baton.deploy.cli")  # a word of every command line of Baton, without directories
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


class Requirement(NamedTuple):
    """A package that Baton needs: the oldest version that will do, the extra that names it ("" for all processes), and
    the version that is installed."""

    name: str
    least: str
    extra: str
    installed: str | None


class Holder(NamedTuple):
    """A process that listens on a port."""

    pid: int
    program: str
    is_baton: bool


class Port(NamedTuple):
    """A port at which a process would listen. `failure` says why that fails. `holder` is None if nobody listens there,
    or a process that this user may not look at."""

    flag: str
    host: str
    port: int
    failure: str = ""
    holder: Holder | None = None


class Tried(NamedTuple):
    """Something that was read or checked as a process does it at its start. `failure`: the error, which says what to
    do."""

    what: str
    failure: str = ""


class Cache(NamedTuple):
    """A directory that Baton or a compiler writes. If it does not exist yet, the nearest parent was looked at."""

    what: str
    path: str
    is_writable: bool
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about this host. None: not asked for, or the system does not tell."""

    python: tuple[int, int, int]
    baton: str
    requirements: tuple[Requirement, ...] = ()
    triton: str | None = None
    gpu: GpuFacts = field(default_factory=GpuFacts)
    cores: frozenset[int] = frozenset()  # on which this process may run
    max_open_files: int
    max_locked_bytes: int | None = None  # None: no limit
    shm_bytes: int | None = None
    has_sealed_memory: bool = True
    free_memory: int
    ports: tuple[Port, ...] = ()
    keys: Tried | None = None
    api_keys: Tried | None = None
    are_api_keys_public: bool = False  # to other users of this host
    model: Tried | None = None
    caches: tuple[Cache, ...] = ()
    proxies: Mapping[str, str] = field(default_factory=dict[str, str])  # that catch http://127.0.0.1, by variable
    routers: tuple[Reached, ...] = ()


def read_facts(config: DoctorConfig) -> Facts:
    """Read all facts, in some seconds."""
    requirements = tuple(_requirements())
    installed = {each.name: each.installed for each in requirements}
    return Facts(
        python=sys.version_info[:3],
        baton=package_version(),
        requirements=requirements,
        triton=_installed("triton"),
        gpu=read_gpus(has_torch=installed.get("torch", _installed("torch")) is not None),
        cores=frozenset(os.sched_getaffinity(0)),
        max_open_files=_limit(resource.RLIMIT_NOFILE) or 1 << 20,
        max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        shm_bytes=_size_of(Path("/dev/shm")),
        has_sealed_memory=_has_sealed_memory(),
        free_memory=available_memory(),
        ports=tuple(_ports(config)),
        keys=_keys(config.keys, config.allow_list),
        api_keys=None if config.api_keys is None else _tried(config.api_keys, lambda: read_keys(config.api_keys or "")),
        are_api_keys_public=_is_public(config.api_keys),
        model=_model(config.model),
        caches=tuple(_caches(os.environ)),
        proxies=proxies_of_loopback(os.environ),
        routers=() if config.router is None else reach_all(config.router, config.keys, config.allow_list),
    )


def _tried(what: str, check: Callable[[], object]) -> Tried:
    try:
        check()
    except BatonError as error:
        return Tried(what, str(error))
    return Tried(what)


def _requirements() -> Iterator[Requirement]:
    try:
        lines = requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        return
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is not None and match[3] not in _EXTRAS_OF_DEVELOPERS:
            yield Requirement(match[1], match[2] or "", match[3] or "", _installed(match[1]))


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _limit(what: int) -> int | None:
    """Return the hard limit, up to which a process may raise its own; None if there is none."""
    _, hard = resource.getrlimit(what)
    return None if hard == resource.RLIM_INFINITY else hard


def _size_of(mount: Path) -> int | None:
    try:
        return shutil.disk_usage(mount).total
    except OSError:
        return None


def _has_sealed_memory() -> bool:
    """Return whether the system gives memory as the pools of KV pages take it (metadata/handoff/memory.py)."""
    try:
        handle = os.memfd_create("baton-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):
        return False
    try:
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _ports(config: DoctorConfig) -> Iterator[Port]:
    node = parse_address(config.node_address)
    places = [("--port", config.host, config.port)]
    if node.scheme == "tcp":
        places.append(("--node-address", "0.0.0.0" if node.host == "*" else node.host, node.port or 0))
    for flag, host, port in places:
        if port:
            failure = _tried("", lambda host=host, port=port: check_port(host, port)).failure
            yield Port(flag, host, port, failure, _holder(port) if failure else None)


def _holder(port: int) -> Holder | None:
    """Return the process that listens on a TCP port; None if no process that this user may look at does."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(each.readlink()) in sockets for each in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                return Holder(
                    int(process.name), Path(words[0]).name, any(Path(word).name in _BATON for word in words[:5])
                )
    return None


def _listening(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a TCP port."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]


def _keys(keys: str | None, allow_list: str | None) -> Tried | None:
    if keys is None and allow_list is None:
        return None
    what = " and ".join(path for path in (keys, allow_list) if path is not None)
    return _tried(what, lambda: KeyPair.configured(ProcessConfig(keys=keys, allow_list=allow_list)))


def _is_public(path: str | None) -> bool:
    try:
        return path is not None and bool(Path(path).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    except OSError:
        return False


def _model(model: str | None) -> Tried:
    """Check a model as `baton up` does: its files, and whether one node can hold its weights."""
    config = EngineConfig(model=model)

    def check() -> None:
        check_model(config)
        check_memory([(config, stored_size(config))])

    return _tried(model or "the demo model", check)


def _caches(environ: Mapping[str, str]) -> Iterator[Cache]:
    base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = {
        "logs and measured kernels": [base / "baton"],
        "kernels of the CPU": kernel_folders(environ, of_gpus=False),
        "kernels of Triton": kernel_folders(environ, of_gpus=True),
    }
    for what, paths in places.items():
        found = [_cache(what, path) for path in paths]
        yield next((each for each in found if each.is_writable), found[-1])


def _cache(what: str, path: Path) -> Cache:
    there = next(each for each in (path, *path.parents) if each.exists())
    is_writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Cache(what, str(path), is_writable, shutil.disk_usage(there).free)


def proxies_of_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the proxies that clients would ask for http://127.0.0.1, by variable, without names and passwords."""
    proxies = {name: environ[name] for name in _PROXIES if environ.get(name)}
    exceptions = {"no": environ.get("no_proxy") or environ.get("NO_PROXY") or ""}
    if proxy_bypass(LOOPBACK, exceptions):
        return {}
    return {name: _public(url) for name, url in proxies.items()}


def _public(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}" if parts.hostname else "..."
