"""Earlier releases, whose processes run beside those of this tree (tests/releases/README.md)."""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVES = Path(__file__).parents[2] / "releases"


def unpack(protocol: int, directory: Path) -> Path:
    """Unpack the last release with this newest protocol. Return the PYTHONPATH for its processes."""
    root = directory / f"protocol-{protocol}"
    with tarfile.open(ARCHIVES / f"protocol-{protocol}.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root
