"""The feed: snapshots of the service (snapshots.py) for everybody who looks (live.py), once per second.

A snapshot is read and encoded once for all viewers of a level, and only while somebody looks. A viewer gets the newest
snapshot when it has read the one before, and never a queue of older ones.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple

import msgspec
from aiohttp import web

from ....metadata.errors import Overloaded, Unavailable
from ..server.access import Caller, share_of
from ..server.sse import COMMENT, EventStream
from .types import Sees, Snapshot

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
UNSENT_BYTES = 1 << 15  # in the kernel, for each viewer
MAX_VIEWERS = 64  # of all tenants; operators come in besides
MAX_VIEWERS_OF_ONE = 16  # of one tenant, or of all operators together


class _Viewer(NamedTuple):
    """One stream of snapshots."""

    stream: EventStream
    sees: Callable[[], Sees | None]  # what it may see now; None: nothing any more
    ended: asyncio.Event


class Feed:
    """All viewers. `read(sees, with_pages=...)` returns a snapshot."""

    def __init__(self, read: Callable[..., Snapshot]) -> None:
        self._read = read
        self._is_closed = False
        self._viewers: list[_Viewer] = []
        self._of_one: Counter[Hashable] = Counter()
        self._newest: dict[tuple[Sees, bool], tuple[float, bytes]] = {}  # with the loop's time at which it was read
        self._timer: asyncio.TimerHandle | None = None  # while somebody looks

    def newest(self, sees: Sees, *, with_pages: bool = True) -> bytes:
        """Return a snapshot as JSON that is no older than PERIOD_S. `with_pages`: it has nodes' pages by owner."""
        now = asyncio.get_running_loop().time()
        kind: tuple[Sees, bool] = (sees, with_pages)
        if kind not in self._newest or now - self._newest[kind][0] >= PERIOD_S:
            self._newest[kind] = now, msgspec.json.encode(self._read(sees, with_pages=with_pages))
        return self._newest[kind][1]

    async def watch(
        self, http_request: web.Request, caller: Caller, sees: Callable[[], Sees | None]
    ) -> web.StreamResponse:
        """Send snapshots until the router drains, the client leaves, or it may see nothing any more: `sees` is asked
        before each. Raises Overloaded if too many look already, Unavailable if the router drains."""
        if self._is_closed:
            raise Unavailable("the router is shutting down")
        share = caller.is_admin, share_of(caller)
        is_full = len(self._viewers) >= MAX_VIEWERS and not caller.is_admin
        if self._of_one[share] >= MAX_VIEWERS_OF_ONE or is_full:
            raise Overloaded(
                f"{self._of_one[share]} streams of /live are open for this caller and {len(self._viewers)} in all; at "
                f"most {MAX_VIEWERS_OF_ONE} and {MAX_VIEWERS} may be: close one, or use GET /live?once=true"
            )
        _limit_unsent(http_request)
        viewer = _Viewer(EventStream(http_request, sys.maxsize, _ignore, COMMENT), sees, asyncio.Event())
        self._viewers.append(viewer)
        self._of_one[share] += 1
        try:
            response = await viewer.stream.open({})
            viewer.stream.push(_event(self.newest(sees() or "counts")))
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)
            await viewer.ended.wait()
            await viewer.stream.close()
            return response
        finally:
            viewer.stream.detach()
            self._viewers.remove(viewer)
            self._of_one[share] -= 1
            if not self._viewers:
                self._rest()

    def close(self) -> None:
        """Send a last snapshot and end all streams. No new one begins."""
        if not self._is_closed:
            try:
                self._send()
            except Exception:  # the router that shuts down has requests to finish
                logger.exception("the last snapshot could not be sent")
        self._is_closed = True
        for viewer in self._viewers:
            viewer.ended.set()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)
        self._send()

    def _send(self) -> None:
        """Send a new snapshot to every viewer that has read its last one. End the streams that may see none."""
        self._newest.clear()
        events: dict[Sees, bytes] = {}
        for viewer in self._viewers:
            sees = viewer.sees()
            if sees is None:
                viewer.ended.set()
            elif not viewer.stream.num_unread:
                if sees not in events:
                    events[sees] = _event(self.newest(sees))
                viewer.stream.push(events[sees])

    def _rest(self) -> None:
        """Nobody looks any more."""
        self._newest.clear()
        self._of_one.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _limit_unsent(http_request: web.Request) -> None:
    """Let the kernel hold little for a client that does not read: it would be a queue of old snapshots."""
    connection = http_request.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)


def _ignore(_is_paused: bool) -> None:
    """A viewer is never paused: it gets nothing while it has something to read."""


def _event(snapshot: bytes) -> bytes:
    return b"event: snapshot\ndata: %b\n\n" % snapshot
