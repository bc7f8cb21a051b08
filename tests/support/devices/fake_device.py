"""A GPU made of numpy arrays, with the interface of a DevicePool. Its work is done only when the test lets it run.

Work under way is a list of closures in order, as on a stream; `run` does it. The pools lie in memfds, which stand for
allocations on a GPU: a process with a descriptor can map the pool read-only.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from baton.kernels.state.pages import page_checksums_ref
from baton.metadata.errors import TransferError
from baton.metadata.handoff.memory import PageMemory, whole_part
from baton.metadata.handoff.pages import Readable, Shared
from baton.metadata.handoff.ranks.shards import PagePart

_numbers = itertools.count()


class FakeGather:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.is_done = False
        self._checksums: list[bytes] = []

    def wait(self) -> None:
        while not self.is_done:
            self._device.run(1)
        self._device.num_waits += 1

    def finish(self, checksums: list[bytes]) -> None:
        self.is_done, self._checksums = True, checksums

    def checksums(self) -> list[bytes]:
        assert self.is_done
        return self._checksums


class FakeMapping:
    def __init__(self, pools: list[np.ndarray], part: PagePart) -> None:
        self.pools, self.part = pools, part
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class View:
    """A pool on the device, with the parts of a PageMemory that tests of host pools read."""

    def __init__(self, device: FakeDevice, place: int) -> None:
        self.device, self.memory = device, device.memory[place]
        self.pages, self.generations = device.pools[place], self.memory.generations
        self.layout, self.page_bytes = self.memory.layout, self.memory.page_bytes
        self.first, self.holds = self.memory.first, self.memory.holds

    def close(self) -> None:
        self.memory.close()


class FakeDevice:
    """Pools in "device memory" beside `memory`, uint8 [num_layers, num_pages, page_layer_bytes] each. If `is_slow`,
    work waits for `run`; otherwise it is done at once."""

    can_be_mapped = True

    def __init__(self, memory: Sequence[PageMemory], *, has_checksums: bool = True, seed: int | None = None) -> None:
        """`seed`: seed of the bytes in the pools, or None for zeros. The mirror has zeros."""
        self.memory, self.has_checksums = memory, has_checksums
        self.is_slow = False
        self.pools: list[np.ndarray] = []
        self.shared: tuple[Shared, ...] = ()
        for pool in memory:
            self._allocate(pool.pages.shape)
        if seed is not None:
            rng = np.random.default_rng(seed)
            for pool in self.pools:
                pool[:] = rng.integers(0, 256, pool.shape, np.uint8)
        self.views = [View(self, place) for place in range(len(memory))]
        self.device = f"GPU-{next(_numbers)}"
        if not self.can_be_mapped:
            self.shared = ()
        self.mappings: list[FakeMapping] = []
        self.calls: list[tuple[str, list[int]]] = []
        self.num_waits = 0
        self._work: list[Callable[[], None]] = []

    def run(self, count: int | None = None) -> None:
        """Do the work under way, or the first `count` of it."""
        for _ in range(len(self._work) if count is None else min(count, len(self._work))):
            self._work.pop(0)()

    def called(self, name: str) -> list[int]:
        """Return the pages of all calls of that name."""
        return [page for what, pages in self.calls if what == name for page in pages]

    # --- as DevicePool says ---

    @property
    def readable(self) -> Readable:
        addresses = tuple(int(pool.ctypes.data) for pool in self.pools)
        return Readable("DRAM", 0, addresses, tuple(pool.nbytes for pool in self.pools))

    def map(
        self,
        descriptors: Sequence[int],
        sizes: Sequence[int],
        num_pages: int,
        part: PagePart | None = None,
        num_tails: int = 0,
    ) -> FakeMapping:
        assert num_tails == 0, "it has no tail pages"
        pools: list[np.ndarray] = []
        part = part or whole_part(self.memory)
        for theirs, descriptor, size in zip(part.pools, descriptors, sizes, strict=True):
            shape = (theirs.layout.num_layers, num_pages, theirs.layout.page_layer_bytes)
            if not np.prod(shape, dtype=object) <= size == os.fstat(descriptor).st_size:
                raise TransferError(f"{size} bytes are no {num_pages} pages, or not those that came")
            mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
            pools.append(np.frombuffer(mapped, np.uint8, int(np.prod(shape))).reshape(shape))
        self.mappings.append(FakeMapping(pools, part))
        return self.mappings[-1]

    def expect(self, pages: Sequence[int]) -> None:
        self.calls.append(("expect", list(pages)))

    def gather(self, peer: Any, sources: Sequence[int], targets: Sequence[int]) -> FakeGather:
        self.calls.append(("gather", list(targets)))
        gather = FakeGather(self)

        def copy() -> None:
            assert not peer.is_closed
            for theirs, ours, (_, _, spans) in zip(peer.pools, self.pools, peer.part.pools, strict=True):
                for start, place, size in spans:
                    ours[:, list(targets), place : place + size] = theirs[:, list(sources), start : start + size]
            gather.finish(self._digests(targets))

        self._work.append(copy)
        if not self.is_slow:
            self.run()
        return gather

    def digest(self, pages: Sequence[int]) -> list[bytes]:
        self.calls.append(("digest", list(pages)))
        return self._digests(pages)

    def begin_digest(self, pages: Sequence[int]) -> FakeGather:
        self.calls.append(("begin_digest", list(pages)))
        digests = FakeGather(self)
        self._work.append(lambda: digests.finish(self._digests(pages)))
        if not self.is_slow:
            self.run()
        return digests

    def store(self, pages: Sequence[int]) -> None:
        self.calls.append(("store", list(pages)))
        for pool, mirror in zip(self.pools, self.memory, strict=True):
            mirror.pages[:, list(pages)] = pool[:, list(pages)]

    def load(self, pages: Sequence[int]) -> list[bytes]:
        self.calls.append(("load", list(pages)))
        for pool, mirror in zip(self.pools, self.memory, strict=True):
            pool[:, list(pages)] = mirror.pages[:, list(pages)]
        return self._digests(pages)

    def _digests(self, pages: Sequence[int]) -> list[bytes]:
        if not self.has_checksums:
            return [b""] * len(pages)
        index = torch.tensor(list(pages))
        pools: list[torch.Tensor] = []
        for pool, memory in zip(self.pools, self.memory, strict=True):
            words = torch.from_numpy(pool).view(torch.int32)
            runs = memory.layout.runs
            sums = [
                page_checksums_ref(words[:, :, r.offset // 4 : r.end // 4], index, r.block_bytes // 4) for r in runs
            ]
            pools.append(torch.cat(sums, dim=2).flatten(1))
        return [row.tobytes() for row in torch.cat(pools, dim=1).numpy().astype("<i8")]

    def _allocate(self, shape: tuple[int, ...]) -> None:
        size = max(1, int(np.prod(shape)))
        descriptor = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        weakref.finalize(self, os.close, descriptor)
        self.pools.append(np.frombuffer(mmap.mmap(descriptor, size), np.uint8).reshape(shape))
        self.shared = (*self.shared, Shared(descriptor, size))
