"""Changes of a prefix cache, read in batches: which pages it has stored and removed since the last batch.

A step of the node only notes that a page has changed. Between steps `read` looks up whether the page is still
cached, and makes its name if it is new. A page that was stored and removed in between appears in no batch.

The first batch begins a walk through the whole cache, parents before their children; so does the one after
`begin_anew`, or after more changes than are kept.

`CacheNews` tells a router in numbered batches (`CachedPages`). A session with it begins with batch 0 and the whole
cache. So does what comes after a loss: a batch that the link had no room for, or one that the router has missed
(`TellPages`). A batch, and so a second, names a bounded number of pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..wire.membership import CachedPages
from .names import PageNames, Place

MAX_CHANGED = 1 << 17  # changes that are kept until they are read
INTERVAL_S = 0.25  # between two batches
BUSY_INTERVAL_S = 0.1  # if the last one left something to tell
BATCH_PAGES = 1024  # looked at for one batch


class CachedPage(Protocol):
    """A page of a prefix cache (engine/state/prefix_cache.py)."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> CachedPage | None: ...
    @property
    def children(self) -> Mapping[bytes, CachedPage]: ...
    @property
    def is_cached(self) -> bool: ...
    @property
    def places(self) -> tuple[Place, ...]: ...
    @property
    def has_tail(self) -> bool: ...


class WatchedCache(Protocol):
    """A prefix cache that says which pages change."""

    @property
    def num_changes(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def lookahead(self) -> int: ...
    def first_pages(self) -> Sequence[CachedPage]: ...
    def watch(self, note: Callable[[CachedPage], object]) -> None: ...
    def unwatch(self, note: Callable[[CachedPage], object]) -> None: ...


class StoredPage(NamedTuple):
    """A page that is new in a batch."""

    name: bytes
    parent: bytes | None  # name of the page before it; None: it is a first page
    key: bytes  # its tokens, int32, and the next ones that its KV depends on; before those of a first page, its salt


@dataclass(slots=True)
class ChangeBatch:
    """Changes of a cache since the batch before. A batch that `begins` also removes all pages that earlier batches have
    named: the cache holds only pages of this batch and of later ones."""

    begins: bool = False
    stored: list[StoredPage] = field(default_factory=list[StoredPage])  # parents first
    removed: list[bytes] = field(default_factory=list[bytes])
    arrived: list[tuple[Place, StoredPage]] = field(default_factory=list[tuple[Place, StoredPage]])  # parents first
    left: list[tuple[Place, bytes]] = field(default_factory=list[tuple[Place, bytes]])
    stored_tails: list[bytes] = field(default_factory=list[bytes])  # names of tail pages
    removed_tails: list[bytes] = field(default_factory=list[bytes])
    is_whole: bool = False  # the walk through the cache has ended
    num_changes: int = 0  # told so far, by this batch and all before it, since the start of the cache


class CacheChanges:
    """Reads the changes of one cache, whose pages it names by `key`. `close` ends it."""

    def __init__(self, cache: WatchedCache, key: bytes, *, has_places: bool = False) -> None:
        """`has_places`: batches also say which pages have come to a place, and left it."""
        self._cache = cache
        self._names = PageNames(key, cache.page_size, cache.lookahead)
        self._changed: deque[CachedPage] = deque()
        self._to_walk: deque[CachedPage] = deque()
        self._told: dict[CachedPage, bytes] = {}  # names of the pages that batches have told
        self._told_tails: set[CachedPage] = set()
        self._told_places: dict[CachedPage, tuple[Place, ...]] = {}
        self._has_places = has_places
        self._begins = True
        cache.watch(self._changed.append)

    @property
    def are_due(self) -> bool:
        """Whether the next batch has something to tell."""
        return self._begins or bool(self._changed) or bool(self._to_walk)

    def begin_anew(self) -> None:
        """Begin with a walk through the whole cache in the next batch."""
        self._begins = True

    def close(self) -> None:
        """Watch the cache no more."""
        self._cache.unwatch(self._changed.append)

    def read(self, most: int) -> ChangeBatch:
        """Return the next batch. It looks at `most` pages, which takes one to two microseconds each."""
        batch = ChangeBatch(begins=self._begins or len(self._changed) > MAX_CHANGED)
        if batch.begins:
            self._begins = False
            self._told.clear()
            self._told_tails.clear()
            self._told_places.clear()
            self._changed.clear()
            self._to_walk = deque(self._cache.first_pages())
        for _ in range(most):
            if self._to_walk:
                self._look(self._to_walk.popleft(), batch)
            elif self._changed:
                self._look(self._changed.popleft(), batch)
            else:
                break
        batch.is_whole = not self._to_walk
        batch.num_changes = self._cache.num_changes - len(self._changed)
        return batch

    def _look(self, page: CachedPage, batch: ChangeBatch) -> None:
        """Enter what has become of a page since batches told it."""
        name = self._told.get(page)
        if page.is_cached and name is None:
            name = self._tell(page, batch)
        if name is None:
            return
        if self._has_places:
            self._look_at_places(page, name, batch)
        if page.has_tail != (page in self._told_tails):
            if page.has_tail:
                batch.stored_tails.append(self._names.of_tail(name))
                self._told_tails.add(page)
            else:
                batch.removed_tails.append(self._names.of_tail(name))
                self._told_tails.remove(page)
        if not page.is_cached:
            batch.removed.append(name)
            del self._told[page]

    def _look_at_places(self, page: CachedPage, name: bytes, batch: ChangeBatch) -> None:
        """Enter the places that a page has come to, and those that it has left."""
        before, now = self._told_places.pop(page, ()), page.places
        parent = None if page.parent is None else self._told.get(page.parent)
        batch.arrived.extend((place, StoredPage(name, parent, page.key)) for place in now if place not in before)
        batch.left.extend((place, name) for place in before if place not in now)
        if now:
            self._told_places[page] = now

    def _tell(self, page: CachedPage, batch: ChangeBatch) -> bytes | None:
        """Enter a new page, and return its name. None: its parent is not told yet, and will bring it."""
        before = page.parent
        if before is None or before.parent is None:  # the root comes before first pages
            tokens = page.key[-self._names.num_key_bytes :]
            salt = page.key[: -self._names.num_key_bytes].decode()
            parent, name = None, self._names.after(self._names.before_first(salt), tokens)
        else:
            parent = self._told.get(before)
            if parent is None:
                return None
            name = self._names.after(parent, page.key)
        self._told[page] = name
        batch.stored.append(StoredPage(name, parent, page.key))
        self._to_walk.extend(page.children.values())
        return name


class CacheNews:
    """Tells the router of one session about the node's cached pages. `send` returns False if the link has no room."""

    def __init__(self, send: Callable[[CachedPages], bool]) -> None:
        self._send = send
        self._changes: CacheChanges | None = None
        self._number = 0  # of the next batch
        self._due_at = 0.0
        self._is_whole = False

    def begin(self, cache: WatchedCache, key: bytes) -> None:
        """A router that names pages by `key` has welcomed the node."""
        self.end()
        self._changes = CacheChanges(cache, key)

    def begin_anew(self) -> None:
        """The router has missed a batch."""
        if self._changes is not None:
            self._changes.begin_anew()

    def end(self) -> None:
        """The router is gone."""
        if self._changes is not None:
            self._changes.close()
        self._changes = None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until `tell` has something to send; None: nothing has changed."""
        if self._changes is None or not self._changes.are_due:
            return None
        return max(0.0, self._due_at - now)

    def tell(self, now: float) -> None:
        """Send the next batch if it is due. `now`: monotonic seconds. To be called between steps."""
        changes = self._changes
        if changes is None or now < self._due_at or not changes.are_due:
            return
        batch = changes.read(BATCH_PAGES)
        self._due_at = now + (BUSY_INTERVAL_S if changes.are_due else INTERVAL_S)
        if batch.begins:
            self._number, self._is_whole = 0, False
        self._is_whole = self._is_whole or batch.is_whole
        message = CachedPages(
            number=self._number,
            stored=b"".join([page.name for page in batch.stored] + batch.stored_tails),
            removed=b"".join(batch.removed + batch.removed_tails),
            num_changes=batch.num_changes,
            is_whole=self._is_whole,
        )
        self._number += 1
        if not self._send(message):
            changes.begin_anew()
