"""The KV pools of a node on CUDA, for the handoff: shared with other processes, gathered, digested.

Each pool lies in an allocation of its own, which other processes of this host map and can read, not write
(cuda_memory.py). Copies of the handoff go over a stream of its own; rounds and chunks are submitted to the current one.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from ...kernels.state.pages import (
    PoolAddress,
    WordSpan,
    gather_pages,
    has_kernels,
    least_of_many,
    page_checksums,
)
from ...metadata.errors import OutOfMemory, TransferError
from ...metadata.handoff.pages import MappedPools, Readable, Shared
from ...metadata.handoff.ranks.shards import PagePart
from ...metadata.handoff.schema.kv_layout import KvLayout
from .cuda_memory import Mapping, map_shared, share

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_STORE_BYTES = 64 << 20  # of pages that lie twice on the device while they are copied to the host
_FEW_PAGES = 16  # of a launch


class _Digested(NamedTuple):
    """Blocks of one size in all pages of one pool (kv_layout.py: BlockRun). The device digests them in one launch."""

    pool: int  # its place among the pools with checksums
    words: torch.Tensor  # [num_layers, num_pages, num_words] int32
    block_words: int
    blocks: slice  # of a page in one layer


class _Slip:
    """Pinned memory of one launch for `num_pages` pages: numbers, which the device reads, and checksums, which it
    writes. It must outlive the launch, which has ended when `done` has happened.

    `shapes`: of a page's checksums, [num_layers, blocks_per_layer], by pool. `parts` are the checksums by run."""

    def __init__(self, num_pages: int, shapes: Sequence[tuple[int, int]], runs: Sequence[_Digested]) -> None:
        self.num_pages = num_pages
        self.pages = torch.empty((2, num_pages), dtype=torch.int32, pin_memory=True)  # from, to
        self.numbers = self.pages.numpy()
        self.rows = (self.pages[0], self.pages[1])
        self.sums = [torch.empty((num_pages, *shape), dtype=torch.int64, pin_memory=True) for shape in shapes]
        self.parts = [self.sums[run.pool][:, :, run.blocks] for run in runs]
        self.done = torch.cuda.Event()


class CudaGather:
    """A launch on the stream of the handoff: copies and checksums, or checksums alone (metadata/handoff/pages.py:
    Gather)."""

    def __init__(self, slip: _Slip, give_back: Callable[[_Slip], None]) -> None:
        self._slip, self._give_back = slip, give_back
        self._checksums: list[bytes] | None = None

    @property
    def is_done(self) -> bool:
        return self._checksums is not None or self._slip.done.query()

    def wait(self) -> None:
        if self._checksums is None:
            self._slip.done.synchronize()

    def checksums(self) -> list[bytes]:
        if self._checksums is None:
            assert self._slip.done.query()
            self._checksums = _as_bytes(self._slip.sums, self._slip.num_pages)
            self._give_back(self._slip)
        return self._checksums


class CudaMapping(NamedTuple):
    """A peer's pools, mapped (metadata/handoff/pages.py: MappedPools)."""

    pools: list[PoolAddress]
    mappings: list[Mapping]
    streams: tuple[torch.cuda.Stream, ...]  # on which gathers from it run, of one device
    spans: list[list[WordSpan]] | None = None  # of each pool; None: the whole pages

    @property
    def num_pages(self) -> int:
        """Pages of the peer, tail pages left out."""
        return self.pools[0].num_pages

    def close(self) -> None:
        for stream in self.streams:
            stream.synchronize()
        with torch.cuda.device(self.streams[0].device):
            for mapping in self.mappings:
                mapping.close()
        self.mappings.clear()


class Mirror(Protocol):
    """The host mirror of one pool, such as a `PageMemory`."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def first(self) -> int:
        """The number of the first page: 0, or that of the first tail page."""
        ...

    @property
    def pages(self) -> np.ndarray:
        """uint8 [num_layers, num_pages, page_layer_bytes]."""
        ...


class CudaPool:
    """The DevicePool of a node on CUDA (metadata/handoff/pages.py). `kvs` are the pools, [num_layers, num_pages, ...]
    each, contiguous, on one device. `memory` has their host mirrors and their layouts."""

    def __init__(
        self,
        kvs: Sequence[torch.Tensor],
        memory: Sequence[Mirror],
        *,
        has_checksums: bool,
    ) -> None:
        self._device = kvs[0].device
        self._pools = [kv.view(kv.shape[0], kv.shape[1], -1).view(torch.int32) for kv in kvs]  # words
        assert all(kv.is_contiguous() for kv in kvs), [kv.stride() for kv in kvs]
        layouts = [pool.layout for pool in memory]
        self._firsts = [pool.first for pool in memory]
        self._mirrors = [torch.from_numpy(pool.pages).view(torch.int32) for pool in memory]
        self._page_bytes = sum(layout.page_bytes for layout in layouts)
        self._runs: list[_Digested] = []
        self._shapes: list[tuple[int, int]] = []  # of a page's checksums, by pool
        if has_checksums:
            self._runs = [run for place, layout in enumerate(layouts) for run in self._runs_of(place, layout)]
            self._shapes = [(layout.num_layers, layout.blocks_per_layer) for layout in layouts]
        self._slips: dict[int, list[_Slip]] = {}  # not in use, by pages
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # pages are waited for
        self._ahead = torch.cuda.Stream(
            self._device, priority=-1
        )  # of checksums that wait for a chunk, as others do not
        self._fences: dict[int, torch.cuda.Event] = {}  # by page: what was submitted before it was expected
        self.device = str(torch.cuda.get_device_properties(self._device).uuid)
        self.shared = self._share()
        for each in self.shared:
            weakref.finalize(self, os.close, each.descriptor)
        self._warm_up()

    @property
    def readable(self) -> Readable:
        """Where other nodes' NIXL reads the pools."""
        sizes = tuple(pool.numel() * pool.element_size() for pool in self._pools)
        return Readable("VRAM", self._device.index or 0, tuple(pool.data_ptr() for pool in self._pools), sizes)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which pages are gathered."""
        return self._stream

    def map(
        self,
        descriptors: Sequence[int],
        sizes: Sequence[int],
        num_pages: int,
        part: PagePart | None = None,
        num_tails: int = 0,
    ) -> CudaMapping:
        """Map a peer's pools. Raises TransferError, with nothing left mapped, if one cannot be mapped.

        With a part, copy its words of page 0, which is padding, so that the kernel is compiled before pages are waited
        for. Without one, the kernel has been compiled at the start."""
        if not has_kernels():
            raise TransferError("triton is not installed, which reads a peer's pool")
        mapping = CudaMapping([], [], (self._stream,), None if part is None else word_spans(part))
        all_words = [pool.shape[2] for pool in self._pools]
        if part is not None:
            all_words = [pool.layout.page_layer_bytes // 4 for pool in part.pools]
        try:
            for pool, first, words, descriptor, size in zip(
                self._pools, self._firsts, all_words, descriptors, sizes, strict=True
            ):
                count = num_tails if first else num_pages
                needed = pool.shape[0] * count * words * 4
                if size < needed:
                    raise TransferError(f"peer's pool has {size} bytes, {count} pages of this layout have {needed}")
                mapping.mappings.append(map_shared(descriptor, size, self._device))
                mapping.pools.append(PoolAddress(mapping.mappings[-1].address, count, words))
        except (TransferError, OSError, ValueError, torch.OutOfMemoryError) as error:
            mapping.close()
            raise TransferError(f"cannot map the peer's pools: {error}") from error
        if part is not None:
            for ours, theirs in self._paddings(num_pages):
                self._gather(mapping, [theirs], [ours]).wait()
        return mapping

    def expect(self, pages: Sequence[int]) -> None:
        fence = _recorded(torch.cuda.current_stream(self._device))
        self._fences |= dict.fromkeys(pages, fence)

    def gather(self, peer: MappedPools, sources: Sequence[int], targets: Sequence[int]) -> CudaGather:
        return self._with_memory(f"a copy of {len(targets)} pages", lambda: self._gather(peer, sources, targets))

    def digest(self, pages: Sequence[int]) -> list[bytes]:
        if not self._runs and self._fences.keys().isdisjoint(pages):
            return [b""] * len(pages)
        return self._with_memory(f"the checksums of {len(pages)} pages", lambda: self._digests(pages))

    def begin_digest(self, pages: Sequence[int]) -> CudaGather:
        return self._with_memory(f"the checksums of {len(pages)} pages", lambda: self._begin_digest(pages))

    def store(self, pages: Sequence[int]) -> None:
        self._with_memory(f"copying {len(pages)} pages to the host", lambda: self._store(pages))

    def load(self, pages: Sequence[int]) -> list[bytes]:
        self._with_memory(f"copying {len(pages)} pages from the host", lambda: self._load(pages))
        return self.digest(pages)

    def _gather(self, peer: MappedPools, sources: Sequence[int], targets: Sequence[int]) -> CudaGather:
        assert isinstance(peer, CudaMapping), peer
        with torch.cuda.device(self._device):
            self._pass_fences(targets)
            slip = self._take_slip(len(targets))
            first = self._first_of(targets)
            first_source = peer.num_pages if first else 0
            slip.numbers[:] = [source - first_source for source in sources], [page - first for page in targets]
            moves = self._readable(slip, self._stream)
            spans = peer.spans or [None] * len(self._pools)
            for place in self._places(first):
                gather_pages(peer.pools[place], self._pools[place], *moves, self._stream, spans[place])
            self._digest(slip, moves[1], self._stream, first)
            return CudaGather(slip, self._give_back)

    def _digests(self, pages: Sequence[int]) -> list[bytes]:
        found: dict[int, bytes] = {}
        with torch.cuda.device(self._device):
            self._pass_fences(pages)
            for _, own in self._by_kind(pages):
                digests = self._launch_digest(own, self._stream)
                digests.wait()
                found |= zip(own, digests.checksums(), strict=True)
        return [found[page] for page in pages]

    def _begin_digest(self, pages: Sequence[int]) -> CudaGather:
        with torch.cuda.device(self._device):
            self._ahead.wait_stream(torch.cuda.current_stream(self._device))
            return self._launch_digest(pages, self._ahead)

    def _launch_digest(self, pages: Sequence[int], stream: torch.cuda.Stream) -> CudaGather:
        slip = self._take_slip(len(pages))
        first = self._first_of(pages)
        slip.numbers[1] = [page - first for page in pages]
        self._digest(slip, self._readable(slip, stream)[1], stream, first)
        return CudaGather(slip, self._give_back)

    def _store(self, pages: Sequence[int]) -> None:
        most = max(1, _STORE_BYTES // self._page_bytes)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode():
            for first, own in self._by_kind(pages):
                for start in range(0, len(own), most):
                    index = torch.tensor(own[start : start + most], dtype=torch.int64) - first
                    for place in self._places(first):
                        copied = self._pools[place].index_select(1, index.to(self._device))
                        self._mirrors[place][:, index] = copied.cpu()

    def _load(self, pages: Sequence[int]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode():
            self._pass_fences(pages)
            for first, own in self._by_kind(pages):
                index = torch.tensor(own, dtype=torch.int64) - first
                for place in self._places(first):
                    copied = self._mirrors[place][:, index].to(self._device)
                    self._pools[place].index_copy_(1, index.to(self._device), copied)
            self._stream.synchronize()

    def _with_memory(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Return what `work` returns. Raises OutOfMemory if the device has no memory for it; no page is written after
        that."""
        with suppress(torch.OutOfMemoryError):
            return work()
        self._stream.synchronize()  # it may have begun to write pages
        raise OutOfMemory(f"the device has no memory left for {what} of a handoff; lower memory_share or max_running")

    def _warm_up(self) -> None:
        """Digest page 0, which is padding, and copy it into itself, so that kernels are compiled before the node says
        hello: for every run one that digests few pages, and one that digests many."""
        for page, _ in self._paddings():
            self.digest([page])
            if has_kernels():
                many = [least_of_many(len(run.words), run.blocks.stop - run.blocks.start) for run in self._runs]
                self.digest([page] * max(many, default=0))
                self.expect([page])  # zeros may still be on their way into it
                addresses = [PoolAddress(pool.data_ptr(), pool.shape[1]) for pool in self._pools]
                self.gather(CudaMapping(addresses, [], (self._stream,)), [page], [page]).wait()

    def _digest(self, slip: _Slip, pages: torch.Tensor, stream: torch.cuda.Stream, first: int) -> None:
        """Compute the checksums of `pages` [num_pages] int32 into the slip, counted from page `first`. Those of pools
        that do not have these pages are 0. This is the last launch for it."""
        for run, sums in zip(self._runs, slip.parts, strict=True):
            if self._firsts[run.pool] == first:
                page_checksums(run.words, pages, run.block_words, sums, stream)
            else:
                sums.zero_()
        slip.done.record(stream)

    def _paddings(self, num_peer_pages: int = 0) -> list[tuple[int, int]]:
        """Return the padding of each kind of pages: its number here, and at a peer of so many kept pages."""
        return [(first, num_peer_pages if first else 0) for first in dict.fromkeys(self._firsts)]

    def _places(self, first: int) -> list[int]:
        """Return the places of the pools whose pages begin at number `first`."""
        return [place for place, each in enumerate(self._firsts) if each == first]

    def _first_of(self, pages: Sequence[int]) -> int:
        """Return where the numbers of these pages begin, which are all of one kind."""
        kinds = self._by_kind(pages)
        assert len(kinds) < 2, pages
        return kinds[0][0] if kinds else 0

    def _by_kind(self, pages: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return the pages of each kind, with the number at which the kind begins."""
        first = max(self._firsts)
        if not first:
            return [(0, list(pages))] if pages else []
        kinds = (0, [page for page in pages if page < first]), (first, [page for page in pages if page >= first])
        return [kind for kind in kinds if kind[1]]

    def _runs_of(self, place: int, layout: KvLayout) -> list[_Digested]:
        """Return the blocks of the pool at `place`, in as few launches as their sizes allow."""
        runs: list[_Digested] = []
        for run in layout.runs:
            assert run.block_bytes % 4 == run.offset % 4 == 0, (run, "a block on a GPU is digested by words of 4 bytes")
            words = self._pools[place][:, :, run.offset // 4 : run.end // 4]
            runs.append(_Digested(place, words, run.block_bytes // 4, slice(run.first, run.first + run.num_blocks)))
        return runs

    def _pass_fences(self, pages: Sequence[int]) -> None:
        """Make later work on the stream wait for work that may still use the pages."""
        fences = {id(fence): fence for page in pages if (fence := self._fences.pop(page, None)) is not None}
        for fence in fences.values():
            if not fence.query():
                self._stream.wait_event(fence)

    def _take_slip(self, num_pages: int) -> _Slip:
        slips = self._slips.get(num_pages)
        return slips.pop() if slips else _Slip(num_pages, self._shapes, self._runs)

    def _give_back(self, slip: _Slip) -> None:
        """Keep the slip of a finished launch for the next one."""
        if slip.num_pages <= _FEW_PAGES:
            self._slips.setdefault(slip.num_pages, []).append(slip)

    def _readable(self, slip: _Slip, stream: torch.cuda.Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slip's numbers where kernels read them fastest: a few are read over the bus sooner than they are
        copied."""
        if slip.num_pages <= _FEW_PAGES:
            return slip.rows
        with torch.cuda.stream(stream):
            moves = slip.pages.to(self._device, non_blocking=True)
        return moves[0], moves[1]

    def _share(self) -> tuple[Shared, ...]:
        """Return what other processes need to map the pools; nothing, with a warning, if CUDA cannot share them."""
        shared: list[Shared] = []
        try:
            for pool in self._pools:
                shared.append(share(pool))
        except (TransferError, OSError) as error:
            for each in shared:
                os.close(each.descriptor)
            logger.warning("the pools cannot be shared (%s): pages travel by way of the host", error)
            return ()
        return tuple(shared)


def word_spans(part: PagePart) -> list[list[WordSpan]]:
    """Return the words of four bytes that a part copies of a page in one layer, pool by pool."""
    spans = [span for pool in part.pools for span in pool.spans]
    assert not any(size % 4 for span in spans for size in span), (spans, "a block on a GPU is copied by words")
    return [[WordSpan(*(size // 4 for size in span)) for span in pool.spans] for pool in part.pools]


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _as_bytes(sums: Sequence[torch.Tensor], num_pages: int) -> list[bytes]:
    """Return each page's checksums in all pools, as little-endian uint64; empty if there are none."""
    columns = [_rows(each) for each in sums]
    if len(columns) == 1:
        return columns[0]
    return [b"".join(parts) for parts in zip(*columns, strict=True)] if columns else [b""] * num_pages


def _rows(sums: torch.Tensor) -> list[bytes]:
    data, size = sums.numpy().astype("<i8", copy=False).tobytes(), 8 * sums.shape[1] * sums.shape[2]
    return [data[start : start + size] for start in range(0, len(data), size)]
