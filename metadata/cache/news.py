"""News of a node's prefix cache for one router, in numbered batches (`CachedPages`).

A session with a router begins with batch 0 and the whole cache. So does what comes after a loss: a batch that the link
had no room for, or one that the router has missed (`TellPages`). A batch, and so a second, names a bounded number of
pages.
"""

from __future__ import annotations

from collections.abc import Callable

from ..wire.membership import CachedPages
from .changes import CacheChanges, WatchedCache

INTERVAL_S = 0.25  # between two batches
BUSY_INTERVAL_S = 0.1  # if the last one left something to tell
BATCH_PAGES = 1024  # looked at for one batch


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
