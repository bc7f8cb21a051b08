"""What a host tier may take of the host's memory, and what it says if that is less than asked for."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest

from baton.engine.tiers import pinned_memory
from baton.engine.tiers.pinned_memory import grant, tier_memory


def test_the_least_of_what_host_and_limits_leave_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "available_memory", lambda: 10 << 30)
    monkeypatch.setattr(pinned_memory, "_lockable_memory", lambda: 1 << 30)
    assert grant(1 << 29, is_pinned=True) == (1 << 29, "")
    num_bytes, reason = grant(1 << 31, is_pinned=True)
    assert num_bytes == 1 << 30 and "RLIMIT_MEMLOCK" in reason and "ulimit -l" in reason and "1.1 GB" in reason
    assert grant(1 << 31, is_pinned=False) == (1 << 31, ""), "plain memory needs no limit of locked memory"
    num_bytes, reason = grant(1 << 40, is_pinned=False)
    assert num_bytes == 10 << 30 and "control groups" in reason


def test_the_soft_limit_of_locked_memory_is_raised_to_the_hard_one() -> None:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    most = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({most} // 2, {most}))\n"
        "from baton.engine.tiers import pinned_memory\n"
        "pinned_memory._CAP_IPC_LOCK = 63\n"  # as a process without that right
        "print(pinned_memory._lockable_memory())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert int(run.stdout) == most


def test_plain_memory_is_writable_and_as_large_as_asked() -> None:
    memory = tier_memory(12345, is_pinned=False)
    memory[:] = 7
    assert memory.dtype == np.uint8 and memory.sum() == 7 * 12345
    assert tier_memory(0, is_pinned=False).size == 0
