"""Functions that ranks run in processes of their own, for the tests of how ranks end."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from baton.engine.ranks.processes import READY, REPORT


def echo(connection: Connection, reports: Connection, rank: int) -> None:
    """Report every frame, with the rank's number."""
    connection.send_bytes(READY)
    while True:
        connection.send_bytes(REPORT + bytes([rank]) + connection.recv_bytes())


def fail(connection: Connection, reports: Connection, rank: int, kind: type[Exception]) -> None:
    raise kind(f"rank {rank} has no model")


def vanish(connection: Connection, reports: Connection, rank: int, *args: Any) -> None:
    """End at once without a word, as a process that the kernel kills for lack of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def load_without_end(connection: Connection, reports: Connection, rank: int) -> None:
    """Never be ready."""
    time.sleep(600)


def hang(connection: Connection, reports: Connection, rank: int) -> None:
    """Say nothing after being ready."""
    connection.send_bytes(READY)
    time.sleep(600)


def hang_in_group(connection: Connection, reports: Connection, rank: int, meeting: str) -> None:
    """Meet rank 0, and join none of its operations."""
    from baton.engine.ranks.group import CpuGroup

    connection.send_bytes(READY)
    CpuGroup(rank, 2, Path(meeting))
    time.sleep(600)
