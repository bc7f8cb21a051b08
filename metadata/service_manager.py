"""Words of this process to the service manager that started it, such as systemd (sd_notify(3)) or Kubernetes.

systemd names a datagram socket in NOTIFY_SOCKET. A probe of a container reads files instead, in the directory that
BATON_STATE_DIR names: `ready` is there while the process serves, and the age of `alive` is how long its loop has been
silent. A process without these variables says nothing.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal

from .logs import Throttle

MORE_TIME_S = 300  # a process that starts asks for so much time with each step of its start
State = Literal["starting", "ready", "alive", "stopping"]
_LINES: dict[State, str] = {
    "starting": f"EXTEND_TIMEOUT_USEC={MORE_TIME_S}000000",
    "ready": "READY=1",
    "alive": "WATCHDOG=1",
    "stopping": "STOPPING=1",
}
_WAIT_S = 1.0  # for room in the manager's socket, with what is said only once
_SPARE_S = 10.0  # between the end of a drain and the end of the process
_alive = Throttle(1.0)


def notify(state: State | None = None, words: str = "", *, limit_s: float = 0.0) -> None:
    """Send the state of this process to the service manager. `words` are the status line of `systemctl status`.
    `limit_s` is the longest time for which a process that stops may still drain, in seconds.

    If the message cannot be sent, it is dropped, and the process goes on."""
    address, folder = (os.environ.get(name, "") for name in ("NOTIFY_SOCKET", "BATON_STATE_DIR"))
    if not (address or folder) or (state == "alive" and not _alive.is_due()):
        return
    if folder and state is not None:
        _mark(Path(folder), state)
    if address:
        _send(address, state, words, limit_s)


def _mark(folder: Path, state: State) -> None:
    with suppress(OSError):  # the disk may be full
        if state == "ready":
            (folder / "ready").touch()
        elif state != "alive":  # a container that starts again finds the files of its last start
            (folder / "ready").unlink(missing_ok=True)
        (folder / "alive").touch()


def _send(address: str, state: State | None, words: str, limit_s: float) -> None:
    lines = [_LINES[state]] if state is not None else []
    if words:
        lines.append(f"STATUS={' '.join(words.split())}")
    if state == "stopping":
        lines.append(f"EXTEND_TIMEOUT_USEC={(limit_s + _SPARE_S) * 1e6:.0f}")
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:  # descriptors may run out
        sender.settimeout(_WAIT_S if state in ("ready", "stopping") else 0.0)
        sender.sendto("\n".join(lines).encode(), address)


def has_manager() -> bool:
    """Whether a service manager listens to this process."""
    return bool(os.environ.get("NOTIFY_SOCKET") or os.environ.get("BATON_STATE_DIR"))


def forget() -> None:
    """Say nothing more. A child process calls this: the manager listens to the process that it started."""
    os.environ.pop("NOTIFY_SOCKET", None)
    os.environ.pop("BATON_STATE_DIR", None)
