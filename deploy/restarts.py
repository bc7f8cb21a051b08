"""Restarts of the processes of `baton up`, as a pure automaton.

             started                  joined
    waiting ---------> starting -----------------> serving
       ^                  | ended                     | ended
       '--- back-off -----'---------------------------'

A node has joined when the router lists it, the router when it answers. A process that ends is started again after
0.5 s, then after twice as long each time, up to 30 s. The count starts anew once a process has served for a minute. The
others serve on meanwhile. A node that the router has refused twice in a row does not fit those that are there: while
another of its role serves, it is started every five minutes only.

`ended` gives everything up only when no pair could ever serve:

- A process ends with the status of a wrong configuration, and none of its role has ever joined: all have the same.
- All processes of a role have ended before they joined, each at least once, and none of the role has ever joined.
- All processes of a role have failed MAX_FAILED_STARTS starts in a row: each ended before it joined.

A node that joins and then dies, however often, is started again for ever. So is one that cannot start while another of
its role can.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..metadata.errors import ConfigError, Refused

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
SERVED_S = 60.0  # who has served so long before it ends begins anew
MAX_FAILED_STARTS = 5
REFUSED_WAIT_S = 300.0
PROOF_S = 2.0  # so long after a new start the router has noticed that the life before is over


class Restart(NamedTuple):
    """The process is to be started again `after_s` from now; it has ended `num_in_row` times in a row."""

    after_s: float
    num_in_row: int


class GiveUp(NamedTuple):
    """No pair could ever serve."""

    reason: str


class _Process:
    """The record of one process."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.joined_at: float | None = None  # in its present life
        self.has_ever_joined = False
        self.num_in_row = 0
        self.num_failed_starts = 0  # in a row
        self.num_refused = 0  # in a row
        self.started_at: float | None = None  # None: it has been started once
        self.start_at: float | None = None  # when it is to be started again


class Restarts:
    """All processes, by name. The clock is an argument, in monotonic seconds."""

    def __init__(self, roles: Iterable[tuple[str, str]]) -> None:
        """`roles`: each process's name and role."""
        self._processes = {name: _Process(role) for name, role in roles}

    def joined(self, name: str, now: float) -> bool:
        """The process is there and serves. True when that is news. Does nothing right after a new start, when it may
        be the life before that the router speaks of."""
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
        """The process has ended, and nobody had asked for it."""
        process = self._processes[name]
        if process.joined_at is None:
            process.num_failed_starts += 1
        elif now - process.joined_at >= SERVED_S:
            process.num_in_row = 0
        process.joined_at = None
        process.num_in_row += 1
        reason = self._hopeless(process, exit_status)
        if reason is not None:
            return GiveUp(reason)
        process.num_refused = process.num_refused + 1 if exit_status == Refused.exit_status else 0
        after_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(process.num_in_row - 1, 16))
        if process.num_refused > 1 and self.serving(process.role):
            after_s = REFUSED_WAIT_S
        process.start_at = now + after_s
        if not self.serving(process.role):  # those who fitted nobody may be needed now
            for each in self._processes.values():
                if each.role == process.role and each.start_at is not None:
                    each.start_at = min(each.start_at, now + MAX_WAIT_S)
        return Restart(after_s, process.num_in_row)

    def due(self, now: float) -> list[str]:
        """Return the processes to start now; they count as started."""
        names = [name for name, each in self._processes.items() if each.start_at is not None and now >= each.start_at]
        for name in names:
            self._processes[name].start_at, self._processes[name].started_at = None, now
        return names

    def is_waiting(self, name: str) -> bool:
        """Whether the process has ended and is to be started again."""
        return self._processes[name].start_at is not None

    def next_start_s(self, now: float) -> float | None:
        """Seconds until somebody is to be started; None: nobody waits for it."""
        times = [each.start_at for each in self._processes.values() if each.start_at is not None]
        return max(0.0, min(times) - now) if times else None

    def serving(self, role: str) -> list[str]:
        """Names of the processes of a role that serve."""
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
