"""Threads that compile kernels launch none, and other threads launch as ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime import jit

from baton.kernels.compile_ahead import compile_all


def test_threads_that_compile_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them fails, which ends no other. Meanwhile another thread launches."""
    seen: list[tuple[int, bool]] = []
    both = threading.Barrier(3)

    def run(kernel: Any, *_: Any, grid: Any, warmup: bool, **__: Any) -> None:
        seen.append((kernel, warmup))

    monkeypatch.setattr(jit.JITFunction, "run", run)

    def launch(kernel: int) -> None:
        both.wait(10)
        jit.JITFunction.run(kernel, 5, grid=(1,), warmup=False, num_warps=4)

    def fail() -> None:
        raise RuntimeError("no such kernel")

    other = threading.Thread(target=launch, args=(2,))
    other.start()
    compile_all([fail, lambda: launch(0), lambda: launch(1)], 2)
    other.join()
    jit.JITFunction.run(3, grid=(1,), warmup=False)
    assert sorted(seen) == [(0, True), (1, True), (2, False), (3, False)]
    assert jit.JITFunction.run is run
