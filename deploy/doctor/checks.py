"""The checks of this host: a table of small functions that judge facts. They read nothing themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...engine.config import MEMORY_SHARE
from ...metadata.logs import size_in_words
from ...metadata.version import install_command
from ...metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from .facts import Facts, Requirement, Tried
from .finding import Finding
from .gpu_facts import Torch
from .reach import Reached

_PYTHON = (3, 11)
_FEW_FILES, _TOO_FEW_FILES = 4096, 256
_LITTLE_DISK, _TOO_LITTLE_DISK = 2 << 30, 100 << 20  # bytes; kernels, logs and measured figures take less
_NO_DEVICE = "CUDA_ERROR_NO_DEVICE"
_LEAST_FREE = 1 << 30  # bytes of memory
_EXTRAS = {"": "every process", "node": "nodes"}  # whose packages these are


def check_host(facts: Facts) -> Iterator[Finding]:
    """Yield the findings of all checks, in the order of the table."""
    for name, check in CHECKS.items():
        for finding in check(facts):
            yield Finding(finding.level, finding.what, finding.mend, name)


def _versions(facts: Facts) -> Iterator[Finding]:
    python = ".".join(map(str, facts.python))
    if facts.python[:2] < _PYTHON:
        yield Finding(
            "error", f"Python is {python}", "Baton needs Python 3.11 or newer: make a new environment with it."
        )
        return
    yield Finding("ok", f"baton {facts.baton}, protocols {PROTOCOL_MIN} to {PROTOCOL_MAX}; Python {python}")


def _packages(facts: Facts) -> Iterator[Finding]:
    extras: dict[str, list[Requirement]] = {}
    for each in facts.requirements:
        extras.setdefault(each.extra, []).append(each)
    if not extras:
        yield Finding("note", "Baton runs without being installed", "Install it: `pip install .` in its folder.")
    for extra, needed in extras.items():
        wrong = [each for each in needed if not _fits(each)]
        if not wrong:
            yield Finding("ok", f"all packages of {f'[{extra}]' if extra else 'a router'}")
            continue
        is_old = any(each.installed for each in wrong)
        names = ", ".join(
            f"{each.name} {each.installed} is older than {each.least}" if each.installed else f"{each.name} is missing"
            for each in wrong
        )
        yield Finding(
            "error" if is_old or not extra else "note",
            f"{_EXTRAS.get(extra, f'[{extra}]')}: {names}",
            f"Run {install_command(extra)}.",
        )


def _fits(each: Requirement) -> bool:
    return each.installed is not None and _numbers(each.installed) >= _numbers(each.least)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what follows them: 2.13.0+cu130 is (2, 13, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _driver(facts: Facts) -> Iterator[Finding]:
    gpu = facts.gpu
    if not gpu.is_any and not gpu.num_on_bus:
        yield Finding("ok", "no GPU here: nodes compute on the CPU")
        return
    if not gpu.is_any:
        mend = "Start the container with `--gpus all`, or install the driver; for nodes on the CPU nothing is wrong."
        yield Finding("note", f"{gpu.num_on_bus} GPUs are in this host, and this process sees none", mend)
        return
    if locked := [each.path for each in gpu.files if not each.is_open_to_us]:
        mend = "Add this user to the group of these files, or start the container with `--gpus all`."
        yield Finding("error", f"{', '.join(locked)} may not be opened by this user", mend)
    is_hidden = gpu.visible is not None and not gpu.driver.gpus
    if is_hidden and (not gpu.driver.failure or _NO_DEVICE in gpu.driver.failure):
        mend = "Unset CUDA_VISIBLE_DEVICES, or name GPUs that are here."
        yield Finding("error", f"CUDA_VISIBLE_DEVICES={gpu.visible!r} hides all GPUs", mend)
    elif gpu.driver.failure:
        mend = "Start the container with `--gpus all`, or install the driver anew and restart the host."
        yield Finding("error", f"the CUDA driver fails: {gpu.driver.failure}", mend)
    elif gpu.driver.cuda is not None:
        names = ", ".join(f"{index}: {each.name}" for index, each in enumerate(gpu.driver.gpus))
        yield Finding("ok", f"{names}; driver for CUDA {_dotted(gpu.driver.cuda)}")


def _torch(facts: Facts) -> Iterator[Finding]:
    torch = facts.gpu.torch
    if torch is None:
        return  # the check of packages tells
    if torch.failure:
        mend = "Install torch anew: `pip install --force-reinstall torch`; if it hangs, restart the GPU's driver."
        yield Finding("error", f"torch cannot be used: {torch.failure}", mend)
    elif facts.gpu.is_any and not torch.num_gpus:
        yield _blind(facts, torch)
    elif torch.num_gpus and facts.triton is None:
        yield Finding("error", "triton is missing, and kernels of the GPU need it", "Run `pip install triton`.")
    else:
        cuda = f" for CUDA {torch.cuda}" if torch.cuda else ""
        yield Finding("ok", f"torch {torch.version}{cuda}" + (f", triton {facts.triton}" if torch.num_gpus else ""))


def _blind(facts: Facts, torch: Torch) -> Finding:
    """Return why torch sees no GPU although there is one."""
    if torch.cuda is None:
        mend = "Install a build of torch with CUDA from your package index (https://pytorch.org/get-started)."
        return Finding("error", f"torch {torch.version} is built without CUDA, so nodes would use the CPU", mend)
    served, wanted = facts.gpu.driver.cuda, _numbers(torch.cuda)
    if served is not None and served[0] < wanted[0]:
        what = f"the driver serves CUDA {_dotted(served)}, and torch {torch.version} needs CUDA {torch.cuda}"
        return Finding("error", what, "Update the driver, or install a torch that is built for an older CUDA.")
    what = f"torch {torch.version} sees no GPU{f': {torch.words}' if torch.words else ''}"
    return Finding("error", what, "Mend the driver as said above, and unset CUDA_VISIBLE_DEVICES if it is set.")


def _gpu_memory(facts: Facts) -> Iterator[Finding]:
    busy = [each for each in facts.gpu.used if each.used_bytes > (1 - MEMORY_SHARE) * each.total_bytes]
    for each in busy:
        what = f"GPU {each.bus}: {size_in_words(each.used_bytes)} of {size_in_words(each.total_bytes)} are in use"
        mend = f"End the other processes (`nvidia-smi` lists them), or lower --memory-share from {MEMORY_SHARE}."
        yield Finding("warning", what, mend)
    if facts.gpu.used and not busy:
        yield Finding("ok", f"at least {MEMORY_SHARE:.0%} of each GPU's memory are free")
    elif facts.gpu.driver.gpus and not facts.gpu.used:
        yield Finding(
            "note", "nvidia-smi does not tell who uses the memory of the GPUs", "Install nvidia-smi to see it."
        )


def _peers(facts: Facts) -> Iterator[Finding]:
    driver = facts.gpu.driver
    if not driver.gpus:
        return
    if alone := [str(index) for index, each in enumerate(driver.gpus) if not each.can_share]:
        what = f"memory of GPU {', '.join(alone)} cannot be given to other processes, so pages travel through the host"
        yield Finding("warning", what, "Update the driver; virtual GPUs (MIG, vGPU) may not offer it.")
    if driver.apart:
        pairs = ", ".join(f"{one} and {other}" for one, other in driver.apart)
        mend = "Choose GPUs that `nvidia-smi topo -p2p r` shows as OK; a virtual machine needs a host that allows P2P."
        what = (
            f"GPUs {pairs} cannot read each other's memory: no ranks (--tp) on them, and pages take the way of the host"
        )
        yield Finding("warning", what, mend)
    if not alone and not driver.apart:
        yield Finding(
            "ok", "processes can map each other's GPU memory" + (", all pairs" if len(driver.gpus) > 1 else "")
        )


def _numa(facts: Facts) -> Iterator[Finding]:
    far = [place for place in facts.gpu.places if not place.cores & facts.cores]
    for place in far:
        mend = f"Start the node with `numactl --cpunodebind={place.numa_node} --membind={place.numa_node}`."
        yield Finding("warning", f"GPU {place.bus} is on NUMA node {place.numa_node}, and no core of it is ours", mend)
    if facts.gpu.places and not far:
        yield Finding("ok", "this process may use cores beside each GPU")


def _memory(facts: Facts) -> Iterator[Finding]:
    if not facts.has_sealed_memory:
        what = "the system gives no sealed memory (memfd), so nodes of one host send pages over sockets"
        yield Finding("warning", what, "Use Linux 5.1 or newer, and a container that allows memfd_create.")
    free = f"{size_in_words(facts.free_memory)} are free"
    if facts.free_memory < _LEAST_FREE:
        yield Finding("error", free, "End other processes, or give the container more memory.")
    else:
        yield Finding("ok", free)


def _shm(facts: Facts) -> Iterator[Finding]:
    size = "missing" if facts.shm_bytes is None else size_in_words(facts.shm_bytes)
    yield Finding("ok", f"/dev/shm is {size}; Baton does not use it: pools are memfds, which count as memory")


def _memlock(facts: Facts) -> Iterator[Finding]:
    size = "unlimited" if facts.max_locked_bytes is None else f"{facts.max_locked_bytes >> 10:,} KiB"
    yield Finding("ok", f"locked memory: {size}; Baton locks none itself")


def _files(facts: Facts) -> Iterator[Finding]:
    what = f"a process may open {facts.max_open_files:,} files and connections"
    mend = (
        "Raise the hard limit to 65536: `ulimit -Hn` as root, systemd's LimitNOFILE=, or `docker run --ulimit nofile=`."
    )
    if facts.max_open_files < _TOO_FEW_FILES:
        yield Finding("error", f"{what}, too few for a router", mend)
    elif facts.max_open_files < _FEW_FILES:
        yield Finding("warning", f"{what}; a router needs one per client", mend)
    else:
        yield Finding("ok", what)


def _ports(facts: Facts) -> Iterator[Finding]:
    for each in facts.ports:
        where = f"{each.flag} {each.port} on {each.host}"
        if not each.failure:
            yield Finding("ok", f"{where} is free")
        elif each.holder is None:
            yield Finding("warning", f"{each.failure}; no process of this user holds it", f"Give another {each.flag}.")
        elif each.holder.is_baton:
            what = f"{where} is held by Baton (process {each.holder.pid})"
            yield Finding("note", what, "Look at it with `baton doctor --cluster`, or stop it.")
        else:
            what = f"{where} is held by {each.holder.program} (process {each.holder.pid})"
            yield Finding("warning", what, f"End that process, or give another {each.flag}.")


def _keys(facts: Facts) -> Iterator[Finding]:
    for each in (facts.keys, facts.api_keys):
        if each is not None:
            yield _of(each)
    if facts.api_keys is not None and facts.are_api_keys_public:
        path = facts.api_keys.what
        yield Finding("warning", f"{path} may be read by other users of this host", f"Run `chmod 600 {path}`.")


def _model(facts: Facts) -> Iterator[Finding]:
    if facts.model is not None:
        yield _of(facts.model)


def _of(tried: Tried) -> Finding:
    return Finding("error", tried.failure) if tried.failure else Finding("ok", f"{tried.what} can be used")


def _caches(facts: Facts) -> Iterator[Finding]:
    is_whole = True
    for each in facts.caches:
        if not each.is_writable:
            variable = "NUMBA_CACHE_DIR" if "CPU" in each.what else "TRITON_CACHE_DIR" if "Triton" in each.what else ""
            mend = f"Set {variable or 'XDG_CACHE_HOME'} to a directory that this user can write."
            yield Finding("warning", f"{each.path} for {each.what} cannot be written", mend)
        elif each.free_bytes < _LITTLE_DISK:
            level = "error" if each.free_bytes < _TOO_LITTLE_DISK else "warning"
            what = f"{each.free_bytes >> 20:,} MiB are free at {each.path} for {each.what}"
            yield Finding(level, what, "Free space there, or set XDG_CACHE_HOME to another disk.")
        else:
            continue
        is_whole = False
    if is_whole and facts.caches:
        yield Finding("ok", f"writable, {size_in_words(min(each.free_bytes for each in facts.caches))} free")


def _proxies(facts: Facts) -> Iterator[Finding]:
    if not facts.proxies:
        yield Finding("ok", "none between clients and 127.0.0.1")
        return
    words = ", ".join(f"{name}={url}" for name, url in facts.proxies.items())
    what = f"{words}: clients such as OpenAI's ask it for http://127.0.0.1"
    yield Finding("warning", what, "Run `export NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost`.")


def _router(facts: Facts) -> Iterator[Finding]:
    key = "a node without a key" if facts.keys is None else f"the key of {facts.keys.what}"
    for each in facts.routers:
        yield _reached(each, key, has_key=facts.keys is not None)


def _reached(each: Reached, key: str, *, has_key: bool) -> Finding:
    if each.failure:
        mend = "Compare the address with the router's --node-address, and look at firewalls between the hosts."
        return Finding("error", f"{each.address} cannot be reached: {each.failure}", mend)
    mtu = f", by an MTU of {each.path_mtu:,}" if each.path_mtu else ""
    match each.key:
        case "taken":
            return Finding("ok", f"{each.address} answers{mtu}, and takes {key}")
        case "untried":
            return Finding("ok", f"{each.address} answers{mtu}; no key was tried: give --keys as nodes here have it")
        case "refused":
            mend = (
                "Compare the key files, or the lists: the router's must name this key, the one here the router's."
                if has_key
                else "Give --keys as nodes here have it, and --allow-list if there is one."
            )
            return Finding("error", f"{each.address} answers, but it does not take {key}", mend)
        case "unanswered":
            mend = "A network that is slow or loses frames would explain it, or a router that is stuck: see its log."
            return Finding("warning", f"{each.address} answers, but not to {key} within some seconds", mend)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


CHECKS: dict[str, Callable[[Facts], Iterator[Finding]]] = {
    "versions": _versions,
    "packages": _packages,
    "GPU driver": _driver,
    "torch": _torch,
    "GPU memory": _gpu_memory,
    "GPU peers": _peers,
    "NUMA": _numa,
    "memory": _memory,
    "/dev/shm": _shm,
    "memlock": _memlock,
    "open files": _files,
    "ports": _ports,
    "key files": _keys,
    "model": _model,
    "caches": _caches,
    "proxies": _proxies,
    "router": _router,
}
