"""The interface of executors, and all that works through it, imports no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["work", "rounds.executor", "rounds.rounds", "pace.padding", "ranks.agreement"],
)
def test_the_module_imports_no_torch(module: str) -> None:
    program = f"import sys, baton.engine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
