"""How much of the host's memory a process may take, on a machine and in control groups of either version."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.state import host_memory
from baton.engine.state.host_memory import available_memory

GIB = 1 << 30
V2 = ("memory.max", "memory.current", "")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@pytest.fixture(autouse=True)
def own_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB available. Return the file that names the groups of this process."""
    (tmp_path / "meminfo").write_text(f"MemTotal:  {80 << 20} kB\nMemFree:  1 kB\nMemAvailable:  {64 << 20} kB\n")
    monkeypatch.setattr(host_memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path / "own"


def make_group(folder: Path, names: tuple[str, str, str], limit: object, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    parts = {"anon": used - cached, f"{names[2]}active_file": cached // 4, f"{names[2]}inactive_file": cached * 3 // 4}
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in parts.items()))


def test_without_groups_it_is_what_the_machine_has_available(own_groups: Path) -> None:
    assert available_memory() == 64 * GIB
    own_groups.write_text("0::/\n1:cpu:/\n")
    assert available_memory() == 64 * GIB


@pytest.mark.parametrize(("line", "root", "names"), [("0::/a/b", ".", V2), ("4:hugetlb,memory:/a/b", "memory", V1)])
def test_a_group_or_one_above_it_bounds_it(
    line: str, root: str, names: tuple[str, str, str], own_groups: Path, tmp_path: Path
) -> None:
    own_groups.write_text(f"12:cpu,cpuacct:/a\n{line}\n")
    make_group(tmp_path / root / "a/b", names, "max" if names is V2 else 2**63 - 4096, 3 * GIB)
    assert available_memory() == 64 * GIB
    make_group(tmp_path / root / "a", names, 32 * GIB, 12 * GIB, cached=8 * GIB)
    assert available_memory() == 28 * GIB, "the kernel frees what it caches of files"
    make_group(tmp_path / root, names, 16 * GIB, 4 * GIB)
    assert available_memory() == 12 * GIB, "in a container its own group may be the root"
    make_group(tmp_path / root / "a/b", names, 2 * GIB, 3 * GIB)
    assert available_memory() == 0
