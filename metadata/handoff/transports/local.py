"""Same host: the peer's pool is mapped read-only and pages are copied in place, one memcpy a (page, layer)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

from ...errors import TransferError
from ...wire.messages import LinkWelcome
from ..memory import PageMemory, PeerMemory
from .base import Landed, Transport


class LocalTransport(Transport):
    """Reads the peer's memfd pools. Raises TransferError when they cannot be mapped."""

    name: ClassVar[str] = "local"

    def __init__(self, memory: Sequence[PageMemory], peers: Sequence[PeerMemory]) -> None:
        super().__init__(memory)
        self._peers = list(peers)

    @classmethod
    def map(cls, memory: Sequence[PageMemory], welcome: LinkWelcome) -> LocalTransport:
        """Maps what the welcome names. Raises TransferError, with nothing left mapped, when that cannot be."""
        if not len(memory) == len(welcome.fds) == len(welcome.sizes):
            raise TransferError(
                f"{len(memory)} pools here, {len(welcome.fds)} fds and {len(welcome.sizes)} sizes there"
            )
        with contextlib.ExitStack() as undo:
            peers: list[PeerMemory] = []
            for pool, fd, size in zip(memory, welcome.fds, welcome.sizes, strict=True):
                peer = PeerMemory(
                    welcome.pid,
                    fd,
                    size,
                    num_layers=pool.num_layers,
                    num_pages=welcome.num_pages,
                    page_layer_bytes=pool.page_layer_bytes,
                )
                undo.callback(peer.close)
                peers.append(peer)
            undo.pop_all()
        return cls(memory, peers)

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def step(self, max_bytes: int) -> Iterator[Landed]:
        num_moves = min(len(self._queue), -(-max_bytes // self.page_bytes))  # what is queued meanwhile waits its turn
        while self._queue and num_moves > 0:
            move = self._queue.popleft()
            for pool, peer in zip(self.memory, self._peers, strict=True):
                pool.pages[:, move.target] = peer.pages[:, move.source]
            num_moves -= 1
            yield Landed(move, int(self._peers[0].generations[move.source]))

    def close(self) -> None:
        super().close()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
