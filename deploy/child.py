"""Child processes of the launcher: their start, their log, their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from .lifeline import PARENT
from .plan import Command


class Child:
    """One process and its log file."""

    def __init__(self, command: Command, run_dir: Path) -> None:
        self.name = command.name
        self.role = command.role
        self.log_path = run_dir / f"{command.name}.log"
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self._log_offset = 0
        self._unfinished = b""

    def start(self) -> None:
        """Starts the process, in a group of its own, with its output in the log, after that of the starts before."""
        environ = {**os.environ, **self._command.environ, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self.num_starts += 1
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
