"""Makes the modules of all rooms of tests/benchmarks, and those of tests/support, importable by their bare names."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent


def _rooms(folder: Path) -> list[Path]:
    return [
        folder,
        *sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(("_", "."))),
    ]


PATHS = [str(room) for folder in (HERE, HERE.parent / "support") for room in _rooms(folder)]
MADE_MODELS = str(HERE / "made_models")  # all that a node needs which makes planted weights

sys.path += [each for each in PATHS if each not in sys.path]
