"""Child processes of the launcher: their start, their log, their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from pathlib import Path

from .lifeline import PARENT
from .plan import Command

_MAX_RESTARTS = 3
_RESTART_WINDOW_S = 60.0


class Child:
    """One process, its log file, and the times of its restarts."""

    def __init__(self, command: Command, run_dir: Path) -> None:
        self.name = command.name
        self.role = command.role
        self.log_path = run_dir / f"{command.name}.log"
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts: deque[float] = deque()
        self._log_offset = 0
        self._unfinished = b""
        self.restart_at: float | None = None  # monotonic time at which the next start is due

    def start(self) -> None:
        """Starts the process, in a group of its own, with its output in the log, after that of the starts before."""
        environ = {**os.environ, **self._command.environ, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self.restart_at = None
        with self.log_path.open("wb" if self._process is None else "ab") as log:
            self._process = subprocess.Popen(
                self._command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                process_group=0,  # Ctrl-C on the terminal is the launcher's to handle
            )

    @property
    def pid(self) -> int:
        """The process's id; it must have been started."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while the process runs or before it was started."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def plan_restart(self) -> bool:
        """Sets `restart_at` after 0.5, 1, 2 s; False when there were too many restarts in the last minute."""
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > _RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= _MAX_RESTARTS:
            return False
        self.restart_at = now + 0.5 * 2 ** len(self._restarts)
        self._restarts.append(now)
        return True

    def terminate(self) -> None:
        """Asks the process to drain and go."""
        if self._process is not None and self.is_running:
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process and whatever it started, now, and reaps it."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the group is gone, which is what we want
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def new_lines(self) -> list[str]:
        """Whole log lines written since the last call."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_offset)
            data = log.read()
        self._log_offset += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines if line.strip()]

    def tail(self, num_lines: int = 15) -> list[str]:
        """The last lines of the log."""
        return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
