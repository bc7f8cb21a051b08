"""The interface of executors, and all that works through it, imports no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["executor", "work", "rounds", "round_stats", "round_timing", "block_tables", "agreement"]
)
def test_the_module_imports_no_torch(module: str) -> None:
    program = f"import sys, baton.engine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
