"""A service manager for tests: the socket that a process started with NOTIFY_SOCKET writes to (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from types import TracebackType

_WAIT_S = 60.0


class ServiceManager:
    """Listens on a socket without a file, as systemd may. `said` holds the lines that have come, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0baton-test-{os.getpid()}-{id(self)}")
        self._socket.settimeout(_WAIT_S)
        self.address = "@" + self._socket.getsockname()[1:].decode()

    def __enter__(self) -> ServiceManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def hear(self, words: str) -> str:
        """Return the next line that contains `words`. Raises TimeoutError."""
        while True:
            lines = self._socket.recv(65536).decode().splitlines()
            self.said += lines
            for line in lines:
                if words in line:
                    return line
