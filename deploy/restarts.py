"""Restart policy of `baton up`: an automaton that decides when to restart an ended process, and when to give up.

             started                  joined
    waiting ---------> starting -----------------> serving
       ^                  | ended                     | ended
       '--- back-off -----'---------------------------'

A node has joined when the router lists it; the router has joined when it answers. The first restart comes after
FIRST_WAIT_S. Each further wait is twice as long, up to MAX_WAIT_S. After SERVED_S of service, waits start at the
beginning again. If the router has refused a node twice in a row, the node does not match the other nodes; it is then
started only every REFUSED_WAIT_S, as long as another node of its role serves.

`ended` gives up only if no pair of nodes could ever serve:

- A process exits because its configuration is wrong, and no process of its role has ever joined. All processes of a
  role have the same configuration.
- Every process of a role has ended before it joined, and none of them has ever joined.
- Every process of a role has failed MAX_FAILED_STARTS starts in a row. A failed start ends before the process joins.

A process that joins and then dies is always restarted, and so is one that cannot start while another process of its
role serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..metadata.errors import ConfigError, Refused

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
SERVED_S = 60.0  # a process that has served this long waits FIRST_WAIT_S again
MAX_FAILED_STARTS = 5
REFUSED_WAIT_S = 300.0
PROOF_S = 2.0  # after this time, the router no longer lists the process of the previous start


class Restart(NamedTuple):
    """The process starts again in `after_s` seconds. It has ended `num_in_row` times in a row."""

    after_s: float
    num_in_row: int


class GiveUp(NamedTuple):
    """No pair of nodes could ever serve."""

    reason: str
    is_misconfigured: bool = False  # a process said that its configuration cannot work


class _Process:
    """The record of one process."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.joined_at: float | None = None  # since its last start
        self.has_ever_joined = False
        self.num_in_row = 0
        self.num_failed_starts = 0  # in a row
        self.num_refused = 0  # in a row
        self.started_at: float | None = None  # of the last restart
        self.start_at: float | None = None  # of the next restart


class Restarts:
    """The records of all processes. Callers pass the time as monotonic seconds."""

    def __init__(self, roles: Iterable[tuple[str, str]]) -> None:
        """`roles`: each process's name and role."""
        self._processes = {name: _Process(role) for name, role in roles}

    def joined(self, name: str, now: float) -> bool:
        """Record that the process serves. Returns True if this is news.

        Ignored for PROOF_S after a restart, because the router may still list the process of the start before.
        """
        process = self._processes[name]
        if process.joined_at is not None or process.start_at is not None:
            return False
        if process.started_at is not None and now - process.started_at < PROOF_S:
            return False
        process.joined_at = now
        process.has_ever_joined = True
        process.num_failed_starts = process.num_refused = 0
        return True

    def ended(self, name: str, exit_status: int, now: float) -> Restart | GiveUp:
        """Record that the process has ended without being asked to. Returns what to do."""
        process = self._processes[name]
        if process.joined_at is None:
            process.num_failed_starts += 1
        elif now - process.joined_at >= SERVED_S:
            process.num_in_row = 0
        process.joined_at = None
        process.num_in_row += 1
        reason = self._hopeless(process, exit_status)
        if reason is not None:
            return GiveUp(reason, is_misconfigured=exit_status == ConfigError.exit_status)
        process.num_refused = process.num_refused + 1 if exit_status == Refused.exit_status else 0
        after_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(process.num_in_row - 1, 16))
        if process.num_refused > 1 and self.serving(process.role):
            after_s = REFUSED_WAIT_S
        process.start_at = now + after_s
        if not self.serving(process.role):  # nodes that the router refused may match now
            for each in self._processes.values():
                if each.role == process.role and each.start_at is not None:
                    each.start_at = min(each.start_at, now + MAX_WAIT_S)
        return Restart(after_s, process.num_in_row)

    def due(self, now: float) -> list[str]:
        """Return the processes to start now, and record them as started."""
        names = [name for name, each in self._processes.items() if each.start_at is not None and now >= each.start_at]
        for name in names:
            self._processes[name].start_at, self._processes[name].started_at = None, now
        return names

    def is_waiting(self, name: str) -> bool:
        """Return whether the process has ended and waits for its next start."""
        return self._processes[name].start_at is not None

    def next_start_s(self, now: float) -> float | None:
        """Return the seconds until the next start, or None if no process waits."""
        times = [each.start_at for each in self._processes.values() if each.start_at is not None]
        return max(0.0, min(times) - now) if times else None

    def serving(self, role: str) -> list[str]:
        """Return the names of the processes of a role that serve."""
        return [name for name, each in self._processes.items() if each.role == role and each.joined_at is not None]

    def _hopeless(self, ended: _Process, exit_status: int) -> str | None:
        peers = [each for each in self._processes.values() if each.role == ended.role]
        if exit_status == ConfigError.exit_status and not any(each.has_ever_joined for each in peers):
            return "its configuration is wrong"
        if all(each.num_failed_starts and not each.has_ever_joined for each in peers):
            return f"no {ended.role} process could start"
        if all(each.num_failed_starts >= MAX_FAILED_STARTS for each in peers):
            return f"no {ended.role} process could start, {MAX_FAILED_STARTS} times in a row"
        return None
