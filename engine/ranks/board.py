"""Memory and wake-ups that the ranks of a group share, so that each knows what all propose for a step. Without torch.

    rank i: post(step, values) --> its two records in the memory <-- read by all ranks
                               --> a byte to the sockets of ranks that sleep

A rank has two records, for even and odd steps. A rank posts step n + 2 only after all have posted step n + 1, and a
rank posts that only after it has read step n. So no record is overwritten before all ranks have read it. A record ends
with a checksum, so a reader that comes too early takes nothing.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...metadata.errors import RankLost

_LINE = 64  # bytes of a cache line
_SPIN_S = 1e-3  # the wait for the other ranks begins without sleep
_PAUSE_S = 5e-5
_CALL_S = 2e-3  # between two wake-ups of ranks that do not come
_ENDED, _LEAVING, _OVER, _FLAGS = range(4)  # bytes of the memory
_AWAKE, _ASLEEP = range(2)
_SUM = struct.Struct("<I")


class Board:
    """The records of all ranks, and the socket that wakes this one. Any thread may call `end`, one the rest."""

    def __init__(self, folder: Path, rank: int, size: int, num_values: int, *, timeout_s: float) -> None:
        """`folder`: only this user can reach it, and all ranks name the same. A rank that does not post within
        `timeout_s` after another one ends the group."""
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(str(folder / f"wake-{rank}"))
        self._addresses = [str(folder / f"wake-{other}") for other in range(size)]
        self._record = struct.Struct(f"<{1 + num_values}q")
        self._stride = -(-(self._record.size + _SUM.size) // _LINE) * _LINE
        self._records = -(-(_FLAGS + 2 * size) // _LINE) * _LINE  # behind flags of the group, and two of each rank
        num_bytes = self._records + 2 * size * self._stride
        opened = os.open(folder / "board", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(opened, num_bytes)
            self._memory = mmap.mmap(opened, num_bytes)
        finally:
            os.close(opened)
        self.step = 0  # the last one that this rank has posted

    @property
    def is_called(self) -> bool:
        """Whether another rank has posted a step that this one has not posted."""
        following = self.step + 1
        return any(self._step_of(rank, following) == following for rank in range(self.size))

    def post(self, values: Sequence[int]) -> None:
        """Post this rank's values for the next step."""
        self.step += 1
        record = self._record.pack(self.step, *values)
        start = self._start(self.rank, self.step)
        self._memory[start : start + len(record) + _SUM.size] = record + _SUM.pack(zlib.crc32(record))

    def wait(self) -> list[tuple[int, ...]]:
        """Wait until all ranks have posted this rank's step. Return the values of each. Raises RankLost if a rank does
        not come in time, or if the group has ended."""
        found: list[tuple[int, ...]] = []
        since, called = time.monotonic(), 0.0
        while True:
            while len(found) < self.size and (values := self._read(len(found))) is not None:
                found.append(values)
            if len(found) == self.size:
                return found
            now = time.monotonic()
            waited_s = now - since
            if self.has_ended or self.is_over:
                raise RankLost("another rank of the group has ended")
            if waited_s > self.timeout_s:
                raise RankLost(f"rank {len(found)} took part in no step for {self.timeout_s:g} s")
            if now - called > _CALL_S:
                called = now
                self._call()
            if waited_s < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_PAUSE_S)

    def sleep(self) -> bool:
        """Say that this rank sleeps until its socket can be read. Return False if another rank calls, so that it must
        not sleep."""
        self._memory[_FLAGS + self.rank] = _ASLEEP
        return not (self.is_called or self.has_ended)

    def wake(self) -> None:
        """Say that this rank is awake, and forget the calls that it has heard."""
        self._memory[_FLAGS + self.rank] = _AWAKE
        try:
            while self.socket.recv(64):
                pass
        except BlockingIOError:
            return

    def end(self) -> None:
        """End the group: no rank waits any more."""
        self._memory[_ENDED] = 1

    @property
    def has_ended(self) -> bool:
        return bool(self._memory[_ENDED])

    def leave(self) -> None:
        """Ask all ranks to leave."""
        if not self._memory[_LEAVING]:
            self._memory[_LEAVING] = 1
            self._call()

    @property
    def is_leaving(self) -> bool:
        return bool(self._memory[_LEAVING])

    def finish(self, *, is_idle: bool) -> bool:
        """Say whether this rank has nothing left to do. Return whether the group is over: it is, for good, as soon as
        one rank has seen that all have said so."""
        place = _FLAGS + self.size + self.rank
        if self._memory[place] != is_idle:
            self._memory[place] = is_idle
            self._call()
        if all(self._memory[_FLAGS + self.size : _FLAGS + 2 * self.size]):
            self._memory[_OVER] = 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether all ranks have said that they have nothing left to do. Some may be gone already."""
        return bool(self._memory[_OVER])

    def close(self) -> None:
        self.socket.close()

    def _call(self) -> None:
        """Wake the ranks that sleep. A rank may fall asleep just now, so a rank that waits calls again and again."""
        for rank, address in enumerate(self._addresses):
            if self._memory[_FLAGS + rank] == _ASLEEP:
                with suppress(OSError):  # it has not read earlier calls, or it is gone
                    self.socket.sendto(b".", address)

    def _start(self, rank: int, step: int) -> int:
        return self._records + (2 * rank + step % 2) * self._stride

    def _step_of(self, rank: int, step: int) -> int:
        start = self._start(rank, step)
        return int.from_bytes(self._memory[start : start + 8], "little")

    def _read(self, rank: int) -> tuple[int, ...] | None:
        """Return what a rank has posted for this rank's step; None: nothing yet."""
        start = self._start(rank, self.step)
        record = self._memory[start : start + self._record.size + _SUM.size]
        step, *values = self._record.unpack_from(record)
        if step != self.step or _SUM.unpack_from(record, self._record.size)[0] != zlib.crc32(record[: -_SUM.size]):
            return None
        return tuple(values)
