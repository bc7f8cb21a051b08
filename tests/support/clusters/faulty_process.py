"""Faults in this process: `switch_on` of the fault injector is undone when the test ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from faulty import Faults, Plan, replacements


class FaultyProcess:
    """This process, with the fault injector in place. Nothing is wrong until a plan says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self._path = directory / "faulty.plan"
        self._num_read = 0
        self._write(Plan())
        self.faults = Faults(self._path)
        for owner, name, value in replacements(self.faults):
            monkeypatch.setattr(owner, name, value)

    def plan(self, **fields: Any) -> None:
        """Set the faults. They are in force in all threads when this returns."""
        self._write(Plan(**fields))
        self.faults.read()

    def noted(self) -> list[tuple[str, str, int]]:
        """Return kind, place and attempt of the faults since the last call."""
        lines = self._path.with_suffix(".faults").read_text().splitlines()
        new, self._num_read = lines[self._num_read :], len(lines)
        return [(each["kind"], each["where"], each["attempt"]) for each in map(json.loads, new)]

    def _write(self, plan: Plan) -> None:
        """Replace the plan file in one step, because other threads read it at any time."""
        aside = self._path.with_suffix(".new")
        aside.write_bytes(msgspec.json.encode(plan))
        aside.rename(self._path)
