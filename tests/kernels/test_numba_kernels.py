"""Compilation of the CPU's kernels in places where nothing can be cached. test_numba_attention.py and
test_numba_rows.py compare what they compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.kernels import operations

pytestmark = pytest.mark.skipif(not operations.is_installed("numba"), reason="needs numba")


def test_kernels_compile_where_nothing_can_be_cached(tmp_path: Path) -> None:
    """A copy of the kernels in a place that cannot be written, and a home that cannot either."""
    source = Path(operations.__file__).with_name("numba_kernels.py").read_text()
    package = tmp_path / "package"
    package.mkdir()
    (package / "numba_kernels.py").write_text(source)
    (package / "__pycache__").write_text("a file: no cache can be here")
    code = (
        "import numpy as np, numba_kernels as k; out = np.empty((1, 2), np.float32);"
        "k.silu_mul(np.array([[1, 2, 3, 4]], np.float32), out); print(out.tolist())"
    )
    environment = {**os.environ, "PYTHONPATH": str(package), "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/x"}
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[[2.19"), done.stdout
    assert done.stderr.count("each start compiles them again") == 1 and "NUMBA_CACHE_DIR" in done.stderr
