"""Nodes that start at the same time with cold caches of kernels, on one GPU: each must come up, every time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NUM_PROCESSES, NUM_ROUNDS = 4, 3
_START = """
import sys
from baton.engine.config import EngineConfig
from baton.engine.startup import load_engine
load_engine(EngineConfig(model=sys.argv[1], device="cuda", dtype="bfloat16", num_pages=64))
print("ready")
"""


@pytest.mark.timeout(1200)
def test_processes_that_fill_one_cold_cache_all_start(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """They share Triton's cache, and nothing else: each measures for itself, at the same time as the others."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "head_dim": 64, "num_hidden_layers": 3}
    model = checkpoint("qwen2", "bfloat16", **sizes)
    for number in range(NUM_ROUNDS):
        started: list[subprocess.Popen[str]] = []
        for process in range(NUM_PROCESSES):
            own = tmp_path / f"{number}-{process}"
            own.mkdir()
            environ = {
                **os.environ,
                "TRITON_CACHE_DIR": str(tmp_path / f"triton-{number}"),
                "XDG_CACHE_HOME": str(own),
                "TMPDIR": str(own),  # the lock of those that measure on one GPU lies here
            }
            command = [sys.executable, "-c", _START, str(model)]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True))
        said = [each.communicate(timeout=300)[0] for each in started]
        assert [each.returncode for each in started] == [0] * NUM_PROCESSES, "\n---\n".join(said)
        assert all("takes exactly" not in each and each.rstrip().endswith("ready") for each in said), said
