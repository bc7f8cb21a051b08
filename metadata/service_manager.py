"""Words of this process to the service manager that started it, such as systemd (sd_notify(3)).

The manager names a datagram socket in NOTIFY_SOCKET. A process without that variable says nothing.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Literal

from .logs import Throttle

MORE_TIME_S = 300  # a process that starts asks for so much time with each step of its start
_LINES = {
    "starting": f"EXTEND_TIMEOUT_USEC={MORE_TIME_S}000000",
    "ready": "READY=1",
    "alive": "WATCHDOG=1",
    "stopping": "STOPPING=1",
}
_WAIT_S = 1.0  # for room in the manager's socket, with what is said only once
_SPARE_S = 10.0  # between the end of a drain and the end of the process
_alive = Throttle(1.0)


def notify(
    state: Literal["starting", "ready", "alive", "stopping"] | None = None, words: str = "", *, limit_s: float = 0.0
) -> None:
    """Send the state of this process to the service manager. `words` are the status line of `systemctl status`.
    `limit_s` is the longest time for which a process that stops may still drain, in seconds.

    If the message cannot be sent, it is dropped, and the process goes on."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or (state == "alive" and not _alive.is_due()):
        return
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
    return bool(os.environ.get("NOTIFY_SOCKET"))


def forget() -> None:
    """Say nothing more. A child process calls this: the manager listens to the process that it started."""
    os.environ.pop("NOTIFY_SOCKET", None)
