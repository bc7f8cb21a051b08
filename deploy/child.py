"""Child processes of the launcher. Starts, logs and ends them, and lets the kernel kill them if the launcher dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from ..metadata.parent import die_with

_PARENT = "BATON_PARENT"  # environment variable of a child: the launcher's process id
_NUM_LAST = 256  # bytes before the place where the next lines begin: if they have changed, the log was cut


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: its name (also the name of its log), role, command line and additions to the environment."""

    name: str
    role: str
    argv: list[str]
    environ: dict[str, str]


class Child:
    """One process and its log file. The process can be started again after it has ended."""

    def __init__(self, command: Command, run_dir: Path) -> None:
        self.name = command.name
        self.role = command.role
        self.log_path = run_dir / f"{command.name}.log"
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self._log_offset = 0
        self._last = b""  # what stood before the offset
        self._unfinished = b""

    def forget(self, flag: str) -> None:
        """Leave a flag out at the next starts."""
        argv = [word for word in self._command.argv if not word.startswith(f"{flag}=")]
        self._command = replace(self._command, argv=argv)

    def start(self) -> None:
        """Start the process in its own process group. Its output goes to the log, after that of earlier starts."""
        environ = {**os.environ, **self._command.environ, _PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        for name in ("NOTIFY_SOCKET", "BATON_STATE_DIR"):  # the service manager listens to the launcher
            environ.pop(name, None)
        self.num_starts += 1
        if self._process is None:
            self.log_path.write_bytes(b"")
        with self.log_path.open("ab") as log:  # a log that something else cuts to nothing begins at its start again
            self._process = subprocess.Popen(
                self._command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                process_group=0,  # Ctrl-C on the terminal signals the launcher only
            )

    @property
    def pid(self) -> int:
        """The process id. The process must have been started."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status, or None if the process runs or was never started."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        """Ask the process to finish its requests and exit."""
        if self._process is not None and self.is_running:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process and everything it started, and wait until it is gone."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the group has already ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def new_lines(self) -> list[str]:
        """Return the complete log lines written since the last call. A log that was cut is read from its start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_offset - len(self._last))
            if log.read(len(self._last)) != self._last:  # it was cut, and may have grown since
                log.seek(0)
                self._log_offset, self._last = 0, b""
            data = log.read()
        self._log_offset += len(data)
        self._last = (self._last + data)[-_NUM_LAST:]
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines if line.strip()]

    def tail(self, num_lines: int = 15) -> list[str]:
        """Return the last lines of the log."""
        return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]


def die_with_parent() -> None:
    """Have the kernel kill this child process when the launcher dies, even if the launcher is killed.

    Does nothing in a process that no launcher started.
    """
    parent = os.environ.pop(_PARENT, None)
    if parent is not None:
        die_with(int(parent))
