"""The disk tier: which nodes of the prefix cache's tree have files, and what is read and written of them.

    host slot --write--> file --too old, too many bytes--> gone
              <--read---

A page that comes to the host tier is written at once, if the disk keeps up. So a file outlives its slot, and the
process. A prompt that needs files waits for them outside the queue, and not for long: `Fetch` says until when.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import structs

from ...metadata.cache.names import PageNames
from ...metadata.estimate import Estimate, Fading
from ...metadata.wire.node_info import DiskLedger, HostFigures
from ..state.cached_node import CachedNode
from .disk_thread import DiskThread, FileRead, FileWrite, HasRead, Wrote
from .page_files import FoundFile, Kind, PageHeader

_MOST_ATTACHED = 256  # files of an earlier node that enter the tree in one step
_SLOW = Fading(to=0.0, after=60.0, half_life=60.0)  # a slow disk is tried again

FileKey = tuple[CachedNode, Kind]


class DiskTree(Protocol):
    """The tree of the prefix cache, as files see it."""

    def node_behind(self, parent: CachedNode | None, key: bytes) -> CachedNode:
        """Return the node of a page, which is made if need be. `parent` None: it is a first page, and its key begins
        with the salt."""
        ...

    def note_file(self, node: CachedNode) -> None:
        """A node, or its tail page, lies in a file that was found or written."""
        ...

    def lose(self, node: CachedNode) -> None:
        """A file of the node is gone: if nothing is left of its page, the node leaves the tree."""
        ...

    def take_read(self, node: CachedNode | None, kind: Kind, slot: int) -> None:
        """Give a node the slot that its file was read into. None: free the slot."""
        ...


@dataclass(slots=True, eq=False)
class Fetch:
    """Files that are read for one prompt."""

    num_left: int
    num_pages: int
    begun: float  # monotonic seconds
    until: float  # the prompt waits no longer


class _Reading(NamedTuple):
    slot: int
    fetches: list[Fetch]


class _File(NamedTuple):
    num_bytes: int
    used_at: float  # monotonic seconds; before this process it may be below 0


@dataclass(slots=True)
class DiskTier:
    """Owns the files of one node. Used by the node's main thread; the disk is another one's (disk_thread.py)."""

    thread: DiskThread
    names: PageNames
    num_bytes: int  # of all files together, at most
    ttl_s: float | None  # since a file was written or read; None: for ever
    tree: DiskTree
    _files: OrderedDict[FileKey, _File] = field(default_factory=OrderedDict[FileKey, _File])  # unused longest first
    _names: dict[CachedNode, bytes] = field(default_factory=dict[CachedNode, bytes])
    _nodes: dict[bytes, CachedNode] = field(default_factory=dict[bytes, CachedNode])  # by name
    _writing: set[FileKey] = field(default_factory=set[FileKey])
    _reading: dict[tuple[bytes, Kind], _Reading] = field(default_factory=dict[tuple[bytes, Kind], _Reading])
    _found: deque[FoundFile] = field(default_factory=deque[FoundFile])
    _page_s: Estimate = field(default_factory=lambda: Estimate(num_kept=3, memory=8, fading=_SLOW))  # of a read
    _total: int = 0  # bytes
    _was_cleared: bool = False
    num_read: int = 0
    num_written: int = 0

    def ledger(self) -> DiskLedger:
        """Count the files, and what is under way."""
        return DiskLedger(
            files=len(self._files), num_bytes=self._total, writing=len(self._writing), reading=len(self._reading)
        )

    def add_figures(self, figures: HostFigures) -> HostFigures:
        """Return the figures of a host tier with those of its files."""
        return structs.replace(
            figures,
            num_files=len(self._files),
            file_bytes=self._total,
            files_written=self.num_written,
            files_read=self.num_read,
            files_damaged=self.thread.num_damaged,
            disk_failures=self.thread.num_failures,
        )

    def write(
        self,
        node: CachedNode,
        kind: Kind,
        rows: Sequence[np.ndarray],
        is_valid: Callable[[], bool],
        wait: Callable[[], object],
    ) -> None:
        """Write a page that lies in a slot, if it has no file yet and few others wait. The arguments are those of
        `FileWrite`."""
        key = (node, kind)
        if key in self._files:
            self._files.move_to_end(key)
        elif key not in self._writing and sum(row.nbytes for row in rows) <= self.num_bytes:
            write = FileWrite(self._name(node), self._header(node, kind), rows, is_valid, wait)
            if self.thread.write(write):
                self._writing.add(key)

    def expected_s(self, num_pages: int) -> float:
        """Return how long it takes to read so many files behind those that are being read."""
        return (num_pages + len(self._reading)) * self._page_s.at(time.monotonic())

    def join(self, node: CachedNode, kind: Kind, fetch: Fetch) -> bool:
        """Let a prompt wait for a file of the node, if it is being read. Return whether it is."""
        reading = self._reading.get((self._name(node), kind))
        if reading is not None:
            reading.fetches.append(fetch)
        return reading is not None

    def read(
        self,
        node: CachedNode,
        kind: Kind,
        slot: int,
        rows: Sequence[np.ndarray],
        wait: Callable[[], object],
        fetch: Fetch,
    ) -> None:
        """Read a file into a slot, which lies in `rows` and can be written after `wait`."""
        name = self._name(node)
        self._reading[name, kind] = _Reading(slot, [fetch])
        self.thread.read(FileRead(name, self._header(node, kind), rows, wait))

    def is_over(self, fetch: Fetch) -> bool:
        """Return whether a prompt waits for no more files: they are there, or they take too long."""
        now = time.monotonic()
        if fetch.num_left and now >= fetch.until:
            self._page_s.observe((now - fetch.begun) / max(1, fetch.num_pages - fetch.num_left), now)
            fetch.num_left = 0
        return not fetch.num_left

    def poll(self) -> None:
        """Enter what the thread has done. Remove files that are too old, or too many."""
        for event in self.thread.poll():
            match event:
                case Wrote():
                    self._wrote(event)
                case HasRead():
                    self._has_read(event)
                case FoundFile() if not self._was_cleared:
                    self._found.append(event)
                case FoundFile():
                    pass
        self._attach_found()
        oldest = -math.inf if self.ttl_s is None else time.monotonic() - self.ttl_s
        while self._files:
            key, file = next(iter(self._files.items()))
            if self._total <= self.num_bytes and file.used_at >= oldest:
                break
            self._drop(key)
            self.tree.lose(key[0])

    def forget(self, node: CachedNode) -> None:
        """The node has left the tree: remove its files."""
        for kind in ("page", "tail"):
            key: FileKey = (node, kind)
            if key in self._files:
                self._drop(key)
            self._writing.discard(key)
        name = self._names.pop(node, None)
        if name is not None:
            del self._nodes[name]

    def clear(self) -> list[CachedNode]:
        """Remove all files. Return the nodes that had some, which are still in the tree."""
        nodes = list(dict.fromkeys(node for node, _ in self._files))
        for node in nodes:
            node.is_filed = node.tail_is_filed = False
        self._files.clear()
        self._writing.clear()
        self._found.clear()
        self._total, self._was_cleared = 0, True
        self.thread.clear()
        return nodes

    def _wrote(self, event: Wrote) -> None:
        node = self._nodes.get(event.name)
        key = None if node is None else (node, event.kind)
        if key in self._writing and node is not None:
            self._writing.discard((node, event.kind))
            if event.num_bytes:
                self.num_written += 1
                self._enter(node, event.kind, _File(event.num_bytes, time.monotonic()))
                self.tree.note_file(node)
        elif key not in self._files and event.num_bytes:  # its node has left the tree meanwhile
            self.thread.remove(event.name, event.kind)

    def _has_read(self, event: HasRead) -> None:
        reading = self._reading.pop((event.name, event.kind))
        for fetch in reading.fetches:
            fetch.num_left = max(0, fetch.num_left - 1)
        node = self._nodes.get(event.name)  # None: it has left the tree meanwhile
        key = None if node is None else (node, event.kind)
        is_there = key in self._files and event.is_whole
        if key is not None and is_there:
            self.num_read += 1
            self._page_s.observe(event.seconds, time.monotonic())
            self._files[key] = self._files[key]._replace(used_at=time.monotonic())
            self._files.move_to_end(key)
        self.tree.take_read(node if is_there else None, event.kind, reading.slot)
        if key is not None and key in self._files and not event.is_whole:
            self._drop(key)
            self.tree.lose(key[0])

    def _attach_found(self) -> None:
        """Enter some of the files that an earlier node has left. With the last ones, bring all files into order."""
        if self._found:
            for _ in range(min(_MOST_ATTACHED, len(self._found))):
                self._attach(self._found.popleft())
            if not self._found:
                self._files = OrderedDict(sorted(self._files.items(), key=lambda item: item[1].used_at))

    def _attach(self, file: FoundFile) -> None:
        """Enter a file that an earlier node has left."""
        header = file.header
        parent = self._nodes.get(header.parent)
        node = self._nodes.get(file.name)
        if header.kind == "page" and (parent is not None or not header.parent):
            node = self.tree.node_behind(parent, header.salt.encode() + header.key)
            self._names[node], self._nodes[file.name] = file.name, node
        if node is None or (node, header.kind) in self._files:
            self.thread.remove(file.name, header.kind)
        else:
            self._enter(node, header.kind, _File(file.num_bytes, time.monotonic() - file.age_s))
            self.tree.note_file(node)

    def _enter(self, node: CachedNode, kind: Kind, file: _File) -> None:
        if kind == "page":
            node.is_filed = True
        else:
            node.tail_is_filed = True
        self._files[node, kind] = file
        self._total += file.num_bytes

    def _drop(self, key: FileKey) -> None:
        """Remove a file."""
        node, kind = key
        self._total -= self._files.pop(key).num_bytes
        if kind == "page":
            node.is_filed = False
        else:
            node.tail_is_filed = False
        self.thread.remove(self._names[node], kind)

    def _parent_name(self, node: CachedNode) -> bytes:
        """Return the name of the page before; b"" for a first page."""
        assert node.parent is not None
        return b"" if node.parent.parent is None else self._name(node.parent)

    def _name(self, node: CachedNode) -> bytes:
        """Return the name of a node, which is made from the names before it."""
        path: list[CachedNode] = []
        at: CachedNode | None = node
        while at is not None and at.parent is not None and at not in self._names:
            path.append(at)
            at = at.parent
        for each in reversed(path):
            header = self._header(each, "page")
            name = self.names.after(header.parent or self.names.before_first(header.salt), header.key)
            self._names[each], self._nodes[name] = name, each
        return self._names[node]

    def _header(self, node: CachedNode, kind: Kind) -> PageHeader:
        num_key_bytes, parent = self.names.num_key_bytes, self._parent_name(node)
        salt = "" if parent else node.key[:-num_key_bytes].decode()
        return PageHeader(kind, salt, parent, node.key[-num_key_bytes:])
