"""Earlier releases, to start their processes beside those of this tree (tests/releases/README.md)."""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVES = Path(__file__).parents[1] / "releases"


def unpack(protocol: int, directory: Path) -> Path:
    """Unpacks the last release whose newest protocol this is. Returns what its processes need as their PYTHONPATH."""
    root = directory / f"protocol-{protocol}"
    with tarfile.open(ARCHIVES / f"protocol-{protocol}.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root
