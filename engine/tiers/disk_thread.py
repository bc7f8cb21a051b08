"""The thread that reads and writes files of cached pages, so that no step of a node waits for a disk.

    node --read, remove, write--> queues --> thread --events--> node

Reads come before removals, and these before writes. A write that finds the queue full is refused. A slot may be reused
before its page is written: the thread copies the slot first, and then sees by the slot's generation whether the copy
is of the page.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from .page_files import FoundFile, Kind, PageFiles, PageHeader

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

MOST_WRITES = 256  # that wait
_SAY_EVERY_S = 60.0  # that the disk fails


class FileWrite(NamedTuple):
    """A page to write, from a slot whose bytes lie in `rows`, uint8, one of each rank with pages of its own."""

    name: bytes
    header: PageHeader
    rows: Sequence[np.ndarray]
    is_valid: Callable[[], bool]  # whether the slot is still the page's
    wait: Callable[[], object]  # until the slot is filled


class FileRead(NamedTuple):
    """A page to read into the slot that lies in `rows`."""

    name: bytes
    header: PageHeader
    rows: Sequence[np.ndarray]
    wait: Callable[[], object]  # until copies use the slot no more


class Wrote(NamedTuple):
    """The page was written; `num_bytes` 0: it was not."""

    name: bytes
    kind: Kind
    num_bytes: int


class HasRead(NamedTuple):
    """The page was read in `seconds`, or (`is_whole` False) there is no such file any more."""

    name: bytes
    kind: Kind
    is_whole: bool
    seconds: float


Event = Wrote | HasRead | FoundFile


class DiskThread:
    """Owns the files of a node. Its methods never wait for the disk."""

    def __init__(self, files: PageFiles) -> None:
        self._files = files
        self._reads = deque[FileRead]()
        self._removals = deque[tuple[bytes, Kind] | None]()  # None: all files
        self._writes = deque[FileWrite]()
        self._events = deque[Event]()
        self._wakes = threading.Condition()
        self._is_over = False
        self._is_busy = True  # it has something to do, or looks for files
        self._said_at = -_SAY_EVERY_S
        self.num_failures = 0  # of the disk
        self.num_damaged = 0  # files
        self._thread = threading.Thread(target=self._run, name="disk cache", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The directory of this node's files."""
        return self._files.path

    @property
    def is_idle(self) -> bool:
        """Whether all that was asked for is done."""
        with self._wakes:
            return not (self._is_busy or self._reads or self._removals or self._writes)

    def read(self, read: FileRead) -> None:
        """Read a page. A `HasRead` follows."""
        with self._wakes:
            self._reads.append(read)
            self._wakes.notify()

    def write(self, write: FileWrite) -> bool:
        """Write a page. A `Wrote` follows. False: too many wait, and none follows."""
        with self._wakes:
            if len(self._writes) >= MOST_WRITES:
                return False
            self._writes.append(write)
            self._wakes.notify()
            return True

    def remove(self, name: bytes, kind: Kind) -> None:
        """Remove a file."""
        with self._wakes:
            self._removals.append((name, kind))
            self._wakes.notify()

    def clear(self) -> None:
        """Remove all files, and those that are to be written."""
        with self._wakes:
            self._writes.clear()
            self._removals.clear()
            self._removals.append(None)
            self._wakes.notify()

    def poll(self) -> list[Event]:
        """Return what was done since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        """End the thread once its present read or write is done, or after 2 s if the disk hangs. Jobs in the queue
        are dropped. May be called twice."""
        with self._wakes:
            if self._is_over:
                return
            self._is_over = True
            self._wakes.notify()
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._files.close()

    def _run(self) -> None:
        self._try(lambda: self._events.extend(self._files.find()))
        while True:
            with self._wakes:
                self._is_busy = False
                self._wakes.wait_for(lambda: self._is_over or self._reads or self._removals or self._writes)
                if self._is_over:
                    return
                self._is_busy = True
                work = (self._reads or self._removals or self._writes).popleft()
            match work:
                case FileRead():
                    self._read(work)
                case FileWrite():
                    self._write(work)
                case None:
                    self._try(self._files.clear)
                case name, kind:
                    self._try(lambda name=name, kind=kind: self._files.remove(name, kind))

    def _read(self, read: FileRead) -> None:
        read.wait()
        begun = time.monotonic()
        is_whole = self._try(lambda: self._files.read(read.name, read.header, read.rows))
        self.num_damaged += is_whole is False
        self._events.append(HasRead(read.name, read.header.kind, bool(is_whole), time.monotonic() - begun))

    def _write(self, write: FileWrite) -> None:
        write.wait()
        copied = [row.copy() for row in write.rows]
        num_bytes = None
        if write.is_valid():
            num_bytes = self._try(lambda: self._files.write(write.name, write.header, copied))
        self._events.append(Wrote(write.name, write.header.kind, num_bytes or 0))

    def _try(self, work: Callable[[], _Result]) -> _Result | None:
        """Return what `work` returns; None if the disk fails."""
        try:
            return work()
        except OSError as error:
            self.num_failures += 1
            if time.monotonic() - self._said_at >= _SAY_EVERY_S:
                self._said_at = time.monotonic()
                logger.warning("disk cache %s: %s", self._files.path, error.strerror or error)
            return None
