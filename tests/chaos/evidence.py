"""Log lines of a cluster that explain a defect. The report contains them, because the log files are rarely kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 40
MAX_LINE = 300  # characters
_COMPLAINTS = (" W ", " E ", " C ")


class Evidence:
    """Reads what was logged since this object was created."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read = {path: path.stat().st_size for path in directory.glob("*.log")}

    def of(self, rid: str) -> str:
        """Return the lines that name the request, and all tracebacks: at most the last MAX_LINES of each process.

        If `rid` is empty (the client never learned it), return all warnings and errors instead.
        """
        words: list[str] = []
        for path in sorted(self._directory.glob("*.log")):
            lines = self._lines(path)
            named = [line for line in lines if (rid in line if rid else any(mark in line for mark in _COMPLAINTS))]
            for line in [*named[-MAX_LINES:], *list(_tracebacks(lines))[-MAX_LINES:]]:
                words.append(f"\n      {path.stem}: {line[:MAX_LINE]}")
        return "".join(words)

    def _lines(self, path: Path) -> list[str]:
        with path.open("rb") as log:
            log.seek(self._read.get(path, 0))
            return log.read().decode("utf-8", "replace").splitlines()


def _tracebacks(lines: list[str]) -> Iterator[str]:
    """Yield the lines of all tracebacks. A traceback ends with the first line that is not indented."""
    is_inside = False
    for line in lines:
        begins = line.startswith("Traceback ")
        if is_inside or begins:
            yield line
        is_inside = begins or (is_inside and line.startswith((" ", "\t")))
