"""How a child process of the launcher notices that its parent has died."""

from __future__ import annotations

import os
import signal
import sys

PARENT = "BATON_PARENT"  # a child reads here who must be alive for it to live

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a child: be killed when the launcher dies, however it dies. Does nothing in a process started by hand."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    import ctypes  # costs 10 ms that `baton --help` need not wait

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)
