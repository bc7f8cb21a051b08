"""Names that a release has replaced. An old name works for one minor release more, and a warning tells the new one.

A row stands where the names of its kind are declared: flags and configuration keys in deploy/flags.py, fields of bodies
in router/http/bodies/fields.py (`Renamed` with `since`), metrics in router/figures/other_names.py. docs/stability.md
says which names are stable, and a test holds them (tests/stable.py).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Replaced(NamedTuple):
    """An old name, the name to use instead (None: nothing takes its place), and the release that deprecated it."""

    old: str
    new: str | None
    since: str  # such as "0.2"

    @property
    def words(self) -> str:
        """A sentence that names the old name and what to do."""
        then = "leave it out" if self.new is None else f"use {self.new}"
        return f"{self.old} is deprecated since Baton {self.since}, and goes in the minor release after it: {then}"


@cache
def warn_once(replaced: Replaced) -> None:
    """Log the sentence when this process first meets the old name."""
    logger.warning("%s", replaced.words)
