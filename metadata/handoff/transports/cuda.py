"""Same host, both pools on GPUs: the peer's device pools are mapped, and pages gathered by a kernel into ours.

    fetch --> queued --step: one launch--> copying --the launch's event, a later step--> Landed
                                         (on a stream of its own)

A page is Landed when the copy is done, our own copy is digested, and the peer's generation was read after both: it
lies in the peer's host memory (as for `local`), and counts up before a page is written again. `step` waits for the
device no longer than it takes the loop to come back: a few pages on a free device land in the step that launched them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from ...errors import TransferError
from ...wire.messages import CudaWelcome
from ...wire.request import Unit
from ..descriptors import DescriptorInbox
from ..device_pool import DevicePool, Gather, MappedPools
from ..memory import PageMemory, PeerMemory
from .base import Landed, Move, Transport

GATHER_BYTES = 512 << 20  # of one launch: forgetting a unit waits for at most what is under way
MAX_UNDER_WAY = 2  # launches: while one is looked at the device has the next
SHORT_BYTES = 64 << 20  # of a launch that is soon done, and waited for, once
SHORT_WAIT_S = 100e-6


class _Launch(NamedTuple):
    moves: list[Move | None]  # None: forgotten
    gather: Gather


class CudaTransport(Transport):
    """Reads the peer's pools on a GPU. Raises TransferError when they cannot be mapped."""

    name: ClassVar[str] = "cuda"

    def __init__(
        self, memory: Sequence[PageMemory], device: DevicePool, pools: MappedPools, generations: PeerMemory
    ) -> None:
        super().__init__(memory)
        self.device = device
        self._pools, self._peer = pools, generations
        self._is_closed = False
        self._launches: deque[_Launch] = deque()

    @classmethod
    def map(
        cls, memory: Sequence[PageMemory], device: DevicePool, inbox: DescriptorInbox, welcome: CudaWelcome
    ) -> CudaTransport:
        """Map the pools that the welcome names, by the descriptors that came to the inbox.

        Raises TransferError, with nothing left mapped or open, when that cannot be.
        """
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as undo:
            descriptors = inbox.take(welcome.pools.token)
            for descriptor in descriptors:
                sent.callback(os.close, descriptor)
            num_pools = {len(descriptors), len(welcome.pools.sizes), len(memory)}
            if len(welcome.fds) != 1 or len(welcome.sizes) != 1 or len(num_pools) != 1:
                raise TransferError(
                    f"{len(welcome.pools.sizes)} pools and {len(descriptors)} descriptors on the peer's GPU, "
                    f"{len(memory)} pools on ours"
                )
            peer = PeerMemory(
                welcome.pid,
                welcome.fds[0],
                welcome.sizes[0],
                num_layers=memory[0].num_layers,
                num_pages=welcome.num_pages,
                page_layer_bytes=memory[0].page_layer_bytes,
            )
            undo.callback(peer.close)
            pools = device.map(descriptors, welcome.pools.sizes, welcome.num_pages)
            undo.pop_all()
        return cls(memory, device, pools, peer)

    @property
    def is_busy(self) -> bool:
        return bool(self._queue or self._launches)

    def step(self, max_bytes: int) -> Iterator[Landed]:  # noqa: ARG002
        """Launches what is queued, bounded by GATHER_BYTES, and hands over what has been copied."""
        done = self._take_done()
        if self._launch() and len(self._launches) == 1:
            self._await_short(self._launches[0])
            done += self._take_done()
        landed: list[Landed] = []
        for moves, gather in done:
            for move, checksums in zip(moves, gather.checksums(), strict=True):
                if move is not None:
                    landed.append(Landed(move, int(self._peer.generations[move.source]), checksums))
        yield from landed  # whoever takes them may close this

    def forget(self, unit: Unit) -> None:
        super().forget(unit)
        for place, (moves, gather) in enumerate(self._launches):
            if any(move is not None and move.unit == unit for move in moves):
                gather.wait()
                kept = [None if move is None or move.unit == unit else move for move in moves]
                self._launches[place] = _Launch(kept, gather)

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
        """Whether something was launched."""
        most = max(1, GATHER_BYTES // self.page_bytes)
        num_before = len(self._launches)
        while self._queue and len(self._launches) < MAX_UNDER_WAY:
            moves = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
            sources, targets = [move.source for move in moves], [move.target for move in moves]
            self._launches.append(_Launch([*moves], self.device.gather(self._pools, sources, targets)))
        return len(self._launches) > num_before

    def _await_short(self, launch: _Launch) -> None:
        if len(launch.moves) * self.page_bytes > SHORT_BYTES:
            return
        until = time.perf_counter() + SHORT_WAIT_S
        while not launch.gather.is_done and time.perf_counter() < until:
            pass
