"""Makes the modules of all rooms of tests/benchmarks, and those of tests/support, importable by their bare names."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
_FOLDERS = (HERE, *HERE.glob("*"), *(HERE.parent / "support").glob("*"))
PATHS = sorted(str(each) for each in _FOLDERS if each.is_dir() and not each.name.startswith(("_", ".")))
MADE_MODELS = str(HERE / "made_models")  # all that a node needs which makes planted weights

sys.path += [each for each in PATHS if each not in sys.path]
