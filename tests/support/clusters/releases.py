"""Earlier releases, whose processes run beside those of this tree (tests/releases/README.md)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import baton

ARCHIVES = Path(__file__).parents[2] / "releases"
_PRINT_KEYS = """
import json, sys
from baton.deploy.cli import _settings
print(json.dumps({command: list(_settings(command)) for command in sys.argv[1:]}))
"""


def newest() -> int:
    """Return the newest protocol of the previous release, whose file is the newest."""
    return max(int(path.name.partition("-")[2].partition(".")[0]) for path in ARCHIVES.glob("protocol-*.tar.xz"))


def unpack(protocol: int, directory: Path) -> Path:
    """Unpack the last release with this newest protocol. Return the PYTHONPATH for its processes."""
    root = directory / f"protocol-{protocol}"
    with tarfile.open(ARCHIVES / f"protocol-{protocol}.tar.xz") as archive:
        archive.extractall(root, filter="data")
    _take_compiled_kernels(root / "baton" / "kernels", Path(baton.__path__[0], "kernels"))
    return root


def _take_compiled_kernels(theirs: Path, ours: Path) -> None:
    """Give a release the kernels that numba has compiled for this tree, from the files that are the same in both.

    To compile them takes longer than the rest of a node's start. numba keeps them beside their source, and uses them
    while the source has the size and time that it had.
    """
    for source in ours.rglob("numba_*.py"):
        copy = theirs / source.relative_to(ours)
        if copy.exists() and copy.read_bytes() == source.read_bytes():
            shutil.copystat(source, copy)
            (copy.parent / "__pycache__").mkdir(exist_ok=True)
            for compiled in source.parent.glob(f"__pycache__/{source.stem}.*.nb[ci]"):
                shutil.copy2(compiled, copy.parent / "__pycache__")


def configuration_keys(root: Path, *commands: str) -> dict[str, list[str]]:
    """Return the keys of the table of each command in the configuration files of a release, unpacked in `root`."""
    program = [sys.executable, "-P", "-c", _PRINT_KEYS, *commands]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    return json.loads(subprocess.run(program, env=environ, stdout=subprocess.PIPE, check=True).stdout)
