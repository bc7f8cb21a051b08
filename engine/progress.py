"""Progress of work that takes seconds: a bar on a terminal, lines in any other log."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from ..metadata.service_manager import notify

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # how much is done, of how much
Item = TypeVar("Item")

_DRAW_EVERY_S = 0.1
_LOG_EVERY_S = 1.0
_WIDTH = 20  # of the bar


@runtime_checkable
class Terminal(Protocol):
    """A log handler on a terminal that can also redraw one line in place."""

    def draw(self, line: str) -> None: ...

    def end_line(self) -> None: ...


def tracked(items: Sequence[Item], progress: Progress | None) -> Iterator[Item]:
    """The items; `progress` hears of each when the next one is asked for."""
    for num_done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(num_done, len(items))


class ProgressBar:
    """A `Progress` that people see: where the log goes to a terminal one line, redrawn in place, else lines of the log,
    at most one a second and the last one always. What begins after all is done (a drafter, after its model) has a line
    of its own. A context manager, so that a line is ended also where the work fails."""

    def __init__(self, what: str, unit: str = "", unit_size: int = 1) -> None:
        """`unit_size`: counts are shown divided by it."""
        self._what = what
        self._unit = f" {unit}" if unit else ""
        self._unit_size = unit_size
        self._begun = self._shown = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        if (terminal := _terminal()) is not None:
            terminal.end_line()

    def __call__(self, num_done: int, num_total: int) -> None:
        now, terminal, is_last = time.monotonic(), _terminal(), num_done >= num_total
        done, total = num_done // self._unit_size, num_total // self._unit_size
        if is_last or now - self._shown >= (_LOG_EVERY_S if terminal is None else _DRAW_EVERY_S):
            self._shown = now
            notify("starting", f"{self._what}: {done} of {total}{self._unit}")
            if terminal is None:
                logger.info("%s: %d of %d%s", self._what, done, total, self._unit)
            elif logger.isEnabledFor(logging.INFO):
                share = num_done / max(1, num_total)
                bar = "#" * int(share * _WIDTH)
                took_s = f"{now - self._begun:.0f} s"
                line = f"{self._what}  [{bar:-<{_WIDTH}}] {share:4.0%}  {done:,} of {total:,}{self._unit}  {took_s}"
                terminal.draw(line.replace("%", " %")[: shutil.get_terminal_size().columns - 1])
        if is_last:
            self._begun = now
            if terminal is not None:
                terminal.end_line()


def _terminal() -> Terminal | None:
    """Return the handler that writes this process's log to a terminal, if there is one."""
    return next((handler for handler in logging.getLogger().handlers if isinstance(handler, Terminal)), None)
