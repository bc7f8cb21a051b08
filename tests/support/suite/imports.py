"""Import modules in a new interpreter and check what they bring along."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable


def check_imports(modules: Iterable[str], forbidden: Iterable[str]) -> None:
    """Check that the modules can be imported, and that none of `forbidden` is loaded after that."""
    code = (
        f"import importlib, sys\nfor name in {sorted(modules)}: importlib.import_module(name)\n"
        f"loaded = set({sorted(forbidden)}) & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
