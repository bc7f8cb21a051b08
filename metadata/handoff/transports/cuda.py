"""Transport `cuda`, for two nodes of one host whose pools lie on GPUs.

The decode node maps the peer's device pools, and a kernel gathers pages from them into ours.

    fetch --> queued --step: one launch--> copying --the launch's event, a later step--> Landed
                                         (on a stream of its own)

A page is Landed when three things have happened in this order: the copy is done, the checksums of our own copy are
computed, and the peer's generation was read. The generations lie in the peer's host memory (as for `local`). The owner
counts a page's generation up before it writes the page again. `step` waits for the device only for a moment: a few
pages on a free device land in the step that launched them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import msgspec

from ...errors import OutOfMemory, TransferError
from ...wire.data_link import CudaWelcome, LinkHello, LinkWelcome
from ...wire.node_info import DevicePools
from ...wire.request import Unit
from ..descriptor_inbox import new_token, send_descriptors
from ..memory import PageMemory, PeerMemory
from ..memory_places import memory_places, send_memory
from ..pages import DevicePool, Gather, MappedPools, OfferedPages
from ..ranks.shards import PagePart
from .base import Landed, Move, PullEnd, Transport, shares_by_inbox

logger = logging.getLogger(__name__)

GATHER_BYTES = 512 << 20  # most bytes of one launch: `forget` may have to wait for a launch
MAX_UNDER_WAY = 2  # launches on the device: it has the next one while the host takes in the last
SHORT_BYTES = 64 << 20  # a launch of no more than this is waited for, once, for SHORT_WAIT_S
SHORT_WAIT_S = 100e-6


class _Launch(NamedTuple):
    moves: list[Move | None]  # None: forgotten
    gather: Gather


class CudaTransport(Transport):
    """Reads the peer's pools on a GPU."""

    name: ClassVar[str] = "cuda"
    needs_same_host: ClassVar[bool] = True
    needs_device: ClassVar[bool] = True
    needs_inbox: ClassVar[bool] = True
    since: ClassVar[int] = CudaWelcome.since

    def __init__(
        self,
        memory: Sequence[PageMemory],
        device: DevicePool,
        pools: MappedPools,
        generations: PeerMemory,
        part: PagePart | None = None,
    ) -> None:
        super().__init__(memory, part)
        self.device = device
        self._pools, self._peer = pools, generations
        self._is_closed = False
        self._launches: deque[_Launch] = deque()

    @classmethod
    def can_serve(cls, pages: OfferedPages) -> bool:
        has_host_memory = all(pool.is_shared for pool in pages.memory)  # the generations lie there
        return has_host_memory and pages.device is not None and bool(pages.device.shared)

    @classmethod
    def welcome(cls, welcome: LinkWelcome, pages: OfferedPages, hello: LinkHello) -> LinkWelcome:
        """Send the descriptors of the GPU pools to the decode node's inbox. Return a CudaWelcome that names them, and
        the host mirror of the target's pool, for its generations. Raises TransferError if they cannot be sent."""
        assert pages.device is not None
        shared, token = pages.device.shared, new_token()
        sizes = tuple(pool.size for pool in shared)
        pools = DevicePools(device=pages.device.device, sizes=sizes, token=token)
        send_descriptors(hello.inbox, token, [pool.descriptor for pool in shared])
        where = pages.counted or pages.memory[0].where
        named = msgspec.structs.replace(welcome, pid=where.pid, fds=(where.fd,), sizes=(where.size,))
        if shares_by_inbox(hello):
            named = msgspec.structs.replace(named, token=send_memory(hello.inbox, [where]))
        return CudaWelcome(**msgspec.structs.asdict(named), pools=pools)

    @classmethod
    def open(cls, end: PullEnd, welcome: LinkWelcome) -> CudaTransport:
        """Map the pools that the welcome names, by the descriptors that came to the inbox.

        Raises TransferError, with nothing left mapped or open, if a pool cannot be mapped.
        """
        memory, device, inbox = end.memory, end.device, end.inbox
        if device is None or inbox is None or not isinstance(welcome, CudaWelcome):
            raise TransferError(f"{type(welcome).__name__} does not say how to use transport {welcome.transport}")
        where = "this" if welcome.pools.device == device.device else "another"
        logger.info("prefill node %s is on %s GPU", welcome.node_id, where)
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as undo:
            descriptors = inbox.take(welcome.pools.token)
            for descriptor in descriptors:
                sent.callback(os.close, descriptor)
            is_one_pool = len(welcome.fds) == len(welcome.sizes) == 1
            num_pools = len(welcome.pools.sizes)
            if not is_one_pool or not len(memory) == num_pools == len(descriptors):
                raise TransferError(
                    f"{len(memory)} pools here, {num_pools} pools with {len(descriptors)} descriptors on the prefill "
                    "node's GPU: start both nodes with the same --speculative and --draft-model"
                )
            layout = memory[0].layout if end.part is None else end.part.pools[0].layout
            num_pages, num_tails = welcome.num_pages, welcome.num_tails
            (where,) = sent.enter_context(memory_places(inbox, welcome))
            peer = PeerMemory(*where, layout, num_pages, num_counted=num_pages + num_tails)
            undo.callback(peer.close)
            sizes = welcome.pools.sizes
            pools = device.map(descriptors, sizes, num_pages, end.part, num_tails)
            undo.pop_all()
        return cls(memory, device, pools, peer, end.part)

    @property
    def is_busy(self) -> bool:
        return bool(self._queue or self._launches)

    def step(self, max_bytes: int) -> Iterator[Landed]:  # noqa: ARG002
        """Launch queued moves, at most GATHER_BYTES at a time, and yield the pages of finished launches."""
        done, failure = self._take_done(), None
        try:
            if self._launch() and len(self._launches) == 1:
                self._await_short(self._launches[0])
                done += self._take_done()
        except OutOfMemory as error:
            failure = error
        landed: list[Landed] = []
        for moves, gather in done:
            for move, checksums in zip(moves, gather.checksums(), strict=True):
                if move is not None:
                    landed.append(Landed(move, int(self._peer.generations[move.source]), checksums))
        yield from landed  # the caller may close this transport between two pages
        if failure is not None and self._queue:
            raise failure

    def forget(self, unit: Unit) -> None:
        super().forget(unit)
        for index, (moves, gather) in enumerate(self._launches):
            if any(move is not None and move.unit == unit for move in moves):
                gather.wait()
                kept = [None if move is None or move.unit == unit else move for move in moves]
                self._launches[index] = _Launch(kept, gather)

    def close(self) -> None:
        super().close()
        for _, gather in self._launches:
            gather.wait()
        self._launches.clear()
        if not self._is_closed:
            self._is_closed = True
            self._pools.close()
            self._peer.close()

    def _take_done(self) -> list[_Launch]:
        done: list[_Launch] = []
        while self._launches and self._launches[0].gather.is_done:
            done.append(self._launches.popleft())
        return done

    def _launch(self) -> bool:
        """Launch queued moves. Return whether any was launched. Raises OutOfMemory; the moves stay queued."""
        most = max(1, GATHER_BYTES // self.page_bytes)
        num_before = len(self._launches)
        while self._queue and len(self._launches) < MAX_UNDER_WAY:
            moves = [self._queue.popleft()]
            while self._queue and len(moves) < most and self._is_tail(self._queue[0]) == self._is_tail(moves[0]):
                moves.append(self._queue.popleft())
            sources, targets = [move.source for move in moves], [move.target for move in moves]
            try:
                gather = self.device.gather(self._pools, sources, targets)
            except OutOfMemory:
                self._queue.extendleft(reversed(moves))
                raise
            self._launches.append(_Launch([*moves], gather))
        return len(self._launches) > num_before

    def _is_tail(self, move: Move) -> bool:
        """Return whether the move is of a tail page: one launch copies pages of one kind."""
        return move.target >= self.memory[0].num_pages

    def _await_short(self, launch: _Launch) -> None:
        if len(launch.moves) * self.page_bytes > SHORT_BYTES:
            return
        until = time.perf_counter() + SHORT_WAIT_S
        while not launch.gather.is_done and time.perf_counter() < until:
            pass
