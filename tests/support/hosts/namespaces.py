"""Namespaces of Linux, by its system calls, which Python's os module has from 3.12 on."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS (sched.h)
NEW_PIDS = 0x20000000  # CLONE_NEWPID
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
BIND = 4096  # MS_BIND (sys/mount.h)
PRIVATE = 0x44000  # MS_REC | MS_PRIVATE

_PR_SET_PDEATHSIG = 1  # sys/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """Give this process new namespaces of these kinds. Raises OSError."""
    _check(_libc.unshare(kinds), "unshare")


def enter(paths: Sequence[str]) -> None:
    """Move this process, which must have one thread, into the namespaces that these files name. Raises OSError."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_descriptor(handle)
        finally:
            os.close(handle)


def enter_descriptor(descriptor: int) -> None:
    """Move this thread into the namespace that the descriptor names. Raises OSError."""
    _check(_libc.setns(descriptor, 0), "setns")


def begin_processes() -> None:
    """Go on as the first process of a new process namespace, whose /proc shows no others. The process that called stays
    behind: it passes signals on, and ends as this one does. Raises OSError."""
    unshare(NEW_MOUNTS | NEW_PIDS)
    child = os.fork()
    if child:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(child, number))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    mount("none", "/", flags=PRIVATE)
    mount("proc", "/proc", "proc")


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """Mount, as mount(2). Raises OSError."""
    _check(_libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, None), f"mount {target}")


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
