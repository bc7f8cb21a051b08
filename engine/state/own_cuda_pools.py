"""The KV pools of ranks with sequences of their own, on GPUs: the pools of a rank lie on its GPU, and rank 0 maps all.

    page p of rank r, on data links:   r * num_pages + p

    rank 0: its pools ----------------------------------------------> CudaPool 0 --.
    rank 1: its pools --descriptors over a Unix socket--> mappings --> CudaPool 1 --+--> OwnCudaPools of rank 0
    rank 2: its pools ------------------------------------------------ ...          '

So rank 0 offers and pulls the pages of all ranks, as it does on CPUs (own_pools.py). Its GPU reads and writes the pools
of other GPUs directly. Every work that writes pages has ended on all ranks when rank 0 goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...metadata.errors import ConfigError, OutOfMemory, TransferError
from ...metadata.handoff.descriptors import TOKEN_LEN, DescriptorInbox, new_token, send_descriptors
from ...metadata.handoff.memory import PageMemory
from ...metadata.handoff.pages import Gather, MappedPools, Shared
from ...metadata.handoff.ranks.shards import PagePart
from ..ranks.ranks import Ranks
from .cuda_memory import Mapping, map_shared, share, tensor_over
from .cuda_pool import CudaMapping, CudaPool
from .own_pools import OwnPages


def share_own_pools(
    ranks: Ranks, kvs: Sequence[torch.Tensor], memory: Sequence[PageMemory], *, has_checksums: bool
) -> OwnCudaPools | None:
    """Return the pools of all ranks on rank 0, which closes them, and None on the others. All ranks must call it.

    `kvs`: pools of this rank, [num_layers, num_pages, ...] each, of one shape on all ranks. `memory`: on rank 0 the
    host mirrors of the pages of all ranks. Raises ConfigError if rank 0 cannot map the pools of another rank."""
    try:
        if ranks.group.rank:
            _give(ranks, kvs)
            return None
        return _take(ranks, kvs, memory, has_checksums)
    except (TransferError, OSError) as error:
        raise ConfigError(
            f"rank {ranks.group.rank} cannot share its KV pools with rank 0, which hands them over: {error}; use "
            "--dp-attention 1"
        ) from error


def _give(ranks: Ranks, kvs: Sequence[torch.Tensor]) -> None:
    """Let rank 0 map the pools of this rank, and wait until it has."""
    inbox, token = ranks.tell(b"").decode(), new_token()
    with contextlib.ExitStack() as sent:
        shared = [share(kv) for kv in kvs]
        for each in shared:
            sent.callback(os.close, each.descriptor)
        send_descriptors(inbox, token, [each.descriptor for each in shared])
    ranks.gather_numbers([*token, *(each.size for each in shared)])
    ranks.meet()


def _take(ranks: Ranks, kvs: Sequence[torch.Tensor], memory: Sequence[PageMemory], has_checksums: bool) -> OwnCudaPools:
    """Map the pools of all ranks."""
    device, num_pages = kvs[0].device, kvs[0].shape[1]
    mirrors = [
        [OwnPages(each.layout, each.pages[:, rank * num_pages : (rank + 1) * num_pages]) for each in memory]
        for rank in range(ranks.num_pools)
    ]
    inbox, mappings = DescriptorInbox(), list[Mapping]()
    with contextlib.ExitStack() as undo:
        undo.callback(_close, mappings, device)
        pools = [CudaPool(kvs, mirrors[0], has_checksums=has_checksums)]
        with contextlib.closing(inbox):
            ranks.tell(inbox.address.encode())
            rows = ranks.gather_numbers([0] * (TOKEN_LEN + len(kvs)))[1:]  # when this returns, all have sent
            for own, row in zip(mirrors[1:], rows, strict=True):
                sizes = row[TOKEN_LEN:]
                shared = [Shared(*each) for each in zip(inbox.take(bytes(row[:TOKEN_LEN])), sizes, strict=True)]
                try:
                    of_rank = [map_shared(*each, device, is_writable=True) for each in shared]
                except TransferError as error:
                    raise ConfigError(
                        f"rank 0 cannot map the KV pools of rank {len(pools)}: its GPU must reach the memory of that "
                        f"rank's GPU: {error}; use --dp-attention 1"
                    ) from error
                mappings += of_rank
                tensors = [
                    tensor_over(mapping, tuple(kv.shape), kv.dtype, device)
                    for mapping, kv in zip(of_rank, kvs, strict=True)
                ]
                pools.append(CudaPool(tensors, own, has_checksums=has_checksums, shared=shared))
        ranks.meet()
        undo.pop_all()
    return OwnCudaPools(pools, num_pages, mappings, device)


class _Part(NamedTuple):
    """The part of one rank in a launch for pages of several ranks."""

    rank: int
    pages: list[int]  # numbers in the rank's pools
    places: list[int]  # of these pages among those that were asked for


class _Gathers:
    """Launches for several ranks as one `Gather`."""

    def __init__(self, num_pages: int, parts: Sequence[tuple[_Part, Gather]]) -> None:
        self._num_pages, self._parts = num_pages, parts

    @property
    def is_done(self) -> bool:
        return all(gather.is_done for _, gather in self._parts)

    def wait(self) -> None:
        for _, gather in self._parts:
            gather.wait()

    def checksums(self) -> list[bytes]:
        return _in_order(self._num_pages, [(part, gather.checksums()) for part, gather in self._parts])


class OwnCudaPools:
    """The pools of all ranks, on rank 0. A `DevicePool` (metadata/handoff/pages.py). Owns the mappings."""

    def __init__(
        self, pools: Sequence[CudaPool], num_pages: int, mappings: Sequence[Mapping], device: torch.device
    ) -> None:
        """`pools`: of each rank, `num_pages` pages each. All work on them runs on `device`, the GPU of rank 0."""
        self._pools, self._num_pages = list(pools), num_pages
        self._mappings, self._device = list(mappings), device
        self.device = pools[0].device
        has_all = all(pool.shared for pool in pools)
        self.shared = tuple(each for pool in pools for each in pool.shared) if has_all else ()

    def close(self) -> None:
        """Unmap the pools of the other ranks, when all work on them has ended. Nothing may be asked for afterwards."""
        self._pools.clear()
        _close(self._mappings, self._device)

    def map(
        self, descriptors: Sequence[int], sizes: Sequence[int], num_pages: int, part: PagePart | None = None
    ) -> CudaMapping:
        mapping = self._pools[0].map(descriptors, sizes, num_pages, part)
        return mapping._replace(streams=tuple(pool.stream for pool in self._pools))

    def expect(self, pages: Sequence[int]) -> None:
        for rank, own, _ in self._parts(pages):
            self._pools[rank].expect(own)

    def gather(self, peer: MappedPools, sources: Sequence[int], targets: Sequence[int]) -> Gather:
        return self._begin(
            targets,
            lambda part: self._pools[part.rank].gather(peer, [sources[place] for place in part.places], part.pages),
        )

    def digest(self, pages: Sequence[int]) -> list[bytes]:
        return _in_order(len(pages), [(part, self._pools[part.rank].digest(part.pages)) for part in self._parts(pages)])

    def begin_digest(self, pages: Sequence[int]) -> Gather:
        return self._begin(pages, lambda part: self._pools[part.rank].begin_digest(part.pages))

    def store(self, pages: Sequence[int]) -> None:
        for rank, own, _ in self._parts(pages):
            self._pools[rank].store(own)

    def load(self, pages: Sequence[int]) -> list[bytes]:
        return _in_order(len(pages), [(part, self._pools[part.rank].load(part.pages)) for part in self._parts(pages)])

    def _begin(self, pages: Sequence[int], launch: Callable[[_Part], Gather]) -> Gather:
        """Launch the work of each rank. If one has no memory for it, nothing is under way when the error is raised."""
        begun = list[tuple[_Part, Gather]]()
        try:
            for part in self._parts(pages):
                begun.append((part, launch(part)))
        except OutOfMemory:
            for _, gather in begun:
                gather.wait()
            raise
        return _Gathers(len(pages), begun)

    def _parts(self, pages: Sequence[int]) -> list[_Part]:
        """Return the part of each rank that has some of the pages."""
        parts: dict[int, _Part] = {}
        for place, page in enumerate(pages):
            rank, own = divmod(page, self._num_pages)
            part = parts.setdefault(rank, _Part(rank, [], []))
            part.pages.append(own)
            part.places.append(place)
        return list(parts.values())


def _in_order(num_pages: int, parts: Sequence[tuple[_Part, Sequence[bytes]]]) -> list[bytes]:
    """Return the checksums of all pages, in the order in which these were asked for."""
    found = [b""] * num_pages
    for part, checksums in parts:
        for place, each in zip(part.places, checksums, strict=True):
            found[place] = each
    return found


def _close(mappings: list[Mapping], device: torch.device) -> None:
    if mappings:
        torch.cuda.synchronize(device)
    for mapping in mappings:
        mapping.close()
    mappings.clear()
