"""Transport `local`, for nodes of one host: the decode node maps the peer's pools read-only and copies pages from them.

Each (page, layer) is one memcpy. If the pools lie on GPUs, the pages travel through both nodes' host mirrors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec

from ...errors import TransferError
from ...wire.data_link import LinkHello, LinkWelcome, RankWelcome
from ..memory import PageMemory, PeerMemory, whole_part
from ..memory_places import MemoryPlace, memory_places, send_memory
from ..pages import OfferedPages
from ..ranks.shards import PagePart
from .base import Landed, PullEnd, Transport, shares_by_inbox


class LocalTransport(Transport):
    """Reads the peer's memfd pools."""

    name: ClassVar[str] = "local"
    needs_same_host: ClassVar[bool] = True

    def __init__(
        self,
        memory: Sequence[PageMemory],
        peers: Sequence[PeerMemory],
        part: PagePart | None = None,
        counted: PeerMemory | None = None,
    ) -> None:
        super().__init__(memory, part)
        self._peers = list(peers)
        self._counted = counted  # the memory of the peer's rank 0, which counts generations; None: the peer is rank 0

    @classmethod
    def can_serve(cls, pages: OfferedPages) -> bool:
        return all(pool.is_shared for pool in pages.memory)

    @classmethod
    def welcome(cls, welcome: LinkWelcome, pages: OfferedPages, hello: LinkHello) -> LinkWelcome:
        """Return the welcome with the file descriptors of all pools, and where rank 0 counts the generations. They are
        sent to the decode node's inbox if it takes them. Raises TransferError if that fails."""
        published = publish_memory(welcome, pages.memory)
        counted = () if pages.counted is None else (pages.counted,)
        if shares_by_inbox(hello):
            places = [pool.where for pool in pages.memory]
            published = msgspec.structs.replace(published, token=send_memory(hello.inbox, [*places, *counted]))
        if pages.counted is None:
            return published
        return RankWelcome(**msgspec.structs.asdict(published), generations=pages.counted)

    @classmethod
    def prepare(cls, pages: OfferedPages, numbers: Sequence[int]) -> None:
        """Copy pages of a GPU into the host mirror, which the decode node maps."""
        pages.bring(numbers)

    @classmethod
    def open(cls, end: PullEnd, welcome: LinkWelcome) -> LocalTransport:
        """Map the pools that the welcome names. Raises TransferError, with nothing left mapped, if that fails."""
        with memory_places(end.inbox, welcome) as places:
            return cls._map(end, welcome, places)

    @classmethod
    def _map(cls, end: PullEnd, welcome: LinkWelcome, places: Sequence[MemoryPlace]) -> LocalTransport:
        """Map the pools, which are in these places; behind them is that of rank 0, if it is another rank."""
        memory, part = end.memory, end.part or whole_part(end.memory)
        if not len(memory) == len(welcome.fds) == len(welcome.sizes):
            raise TransferError(
                f"{len(memory)} pools here, {len(welcome.fds)} descriptors with {len(welcome.sizes)} sizes from the "
                "prefill node: start both nodes with the same --speculative and --draft-model"
            )
        with contextlib.ExitStack() as undo:
            peers: list[PeerMemory] = []
            num_counted = welcome.num_pages + welcome.num_tails
            for own, pool, (pid, fd, size) in zip(memory, part.pools, places, strict=False):
                num_pages, first = welcome.num_pages, 0
                if own.first:  # tail pages
                    num_pages, first = welcome.num_tails, welcome.num_pages
                peer = PeerMemory(pid, fd, size, pool.layout, num_pages, first, num_counted=num_counted)
                undo.callback(peer.close)
                peers.append(peer)
            counted = None
            if isinstance(welcome, RankWelcome):
                layout = part.pools[0].layout
                counted = PeerMemory(*places[-1], layout, welcome.num_pages, num_counted=num_counted)
            undo.pop_all()
        return cls(memory, peers, part, counted)

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def step(self, max_bytes: int) -> Iterator[Landed]:
        # moves that are queued meanwhile wait for the next step
        num_moves = min(len(self._queue), -(-max_bytes // self.page_bytes))
        while self._queue and num_moves > 0:
            move = self._queue.popleft()
            for pool, peer, (_, _, spans) in zip(self.memory, self._peers, self.part.pools, strict=True):
                for source, target, num_bytes in spans if pool.holds(move.target) else ():
                    # no variable holds a view of the peer's pages: the link may be lost before the next page
                    pool.pages[:, move.target - pool.first, target : target + num_bytes] = peer.pages[
                        :, move.source - peer.first, source : source + num_bytes
                    ]
            num_moves -= 1
            yield Landed(move, int((self._counted or self._peers[0]).generations[move.source]))

    def close(self) -> None:
        super().close()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        if self._counted is not None:
            self._counted.close()
            self._counted = None


def publish_memory(welcome: LinkWelcome, memory: Sequence[PageMemory]) -> LinkWelcome:
    """Return the welcome with the process id, the file descriptors and the sizes of these pools of this process."""
    return msgspec.structs.replace(
        welcome,
        pid=os.getpid(),
        fds=tuple(pool.fd for pool in memory if pool.fd is not None),
        sizes=tuple(pool.size for pool in memory),
    )
