"""How much of the host's memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def available_memory() -> int:
    """Return the bytes of the host's memory that are available to this process. A container has no more than its
    control groups (cgroup v1 or v2) leave."""
    return max(0, min([_left_by_the_host(), *_left_by_groups()]))


def _left_by_the_host() -> int:
    """Return the bytes that the kernel estimates a new process can take without swapping."""
    fields = dict(line.split(":") for line in _MEMORY.read_text(encoding="utf-8").splitlines())
    return int(fields["MemAvailable"].removesuffix("kB")) * 1024


def _left_by_groups() -> Iterator[int]:
    """Yield what each control group of this process leaves: its limit less its usage. A cache of files counts as left,
    since the kernel frees it first."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, prefix = _GROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):  # version 1, which counts groups below by other names
            root, limit, usage, prefix = _GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        parts = Path(path).parts[1:]
        for depth in range(len(parts) + 1):  # limits of the groups above hold too; in a container the root is its own
            group = root.joinpath(*parts[:depth])
            with suppress(OSError, ValueError):  # no such file, or "max": no limit
                left = int((group / limit).read_text()) - int((group / usage).read_text())
                yield left + _cached(group / "memory.stat", prefix)


def _cached(path: Path, prefix: str) -> int:
    stat = dict(line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
