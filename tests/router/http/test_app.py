"""The application as a whole: which paths it serves, and which key each of them needs."""

from __future__ import annotations

import subprocess
import sys


def test_the_router_imports_nothing_heavy() -> None:
    code = "import baton.router.main, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
