"""The end of a process whose parent has ended, however it ended."""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process, even a stopped one, when its parent, process `parent`, ends. Only Linux can do
    that; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # imported here because `baton --help` does not need it, and the import is slow

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)
