"""Rank 0 maps the pools of all ranks and hands them over. Host memory stands for that of the GPUs here;
tests/gpu/test_own_ranks_cuda.py has the real one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from handoff_nodes import DRAFT_SCHEMA
from host_cuda import HostCuda, with_host_cuda
from memory_limit import MemoryLimit
from thread_ranks import ThreadGroup

pytest.importorskip("triton")

from baton.engine.products.ranked import RankRows
from baton.engine.ranks.ranks import Ranks
from baton.engine.state import cuda_pool, own_cuda_pools
from baton.engine.state.own_cuda_pools import OwnCudaPools, share_own_pools
from baton.metadata.errors import ConfigError, OutOfMemory, TransferError
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.pages import Shared
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.handoff.schema.schema import kv_layouts, on_gpu

SIZE, NUM_PAGES = 3, 8
LAYOUTS = kv_layouts(on_gpu(DRAFT_SCHEMA))


class Mapped(NamedTuple):
    """A mapping of memory that a tensor has."""

    address: int
    size: int
    log: list[int]

    def close(self) -> None:
        self.log.append(self.address)


class World:
    """The pools of all ranks as tensors, what rank 0 made of them, and the errors of ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda: HostCuda = with_host_cuda(monkeypatch)
        self.closed: list[int] = []
        self.kvs = [
            [_random(layout, 10 * rank + place) for place, layout in enumerate(LAYOUTS)] for rank in range(SIZE)
        ]
        self.memory = [PageMemory(layout, SIZE * NUM_PAGES) for layout in LAYOUTS]
        self.found: dict[int, Any] = {}
        by_descriptor: dict[int, torch.Tensor] = {}
        cannot: list[torch.Tensor] = []
        self.cannot = cannot

        def share(kv: torch.Tensor) -> Shared:
            if any(kv.data_ptr() == each.data_ptr() for each in cannot):
                raise TransferError("no file descriptor")
            descriptor = os.memfd_create("pool")
            os.write(descriptor, str(kv.data_ptr()).encode())
            by_descriptor[kv.data_ptr()] = kv
            return Shared(descriptor, kv.nbytes)

        def map_shared(descriptor: int, size: int, device: torch.device, *, is_writable: bool = False) -> Mapped:
            kv = by_descriptor[int(os.pread(descriptor, 100, 0))]
            assert is_writable and size == kv.nbytes and device == kv.device
            return Mapped(kv.data_ptr(), size, self.closed)

        monkeypatch.setattr(cuda_pool, "share", share)
        monkeypatch.setattr(own_cuda_pools, "share", share)
        monkeypatch.setattr(own_cuda_pools, "map_shared", map_shared)
        monkeypatch.setattr(cuda_pool.CudaPool, "_warm_up", lambda _: None)

    def meet(self) -> None:
        """Let all ranks share their pools."""
        group = ThreadGroup(SIZE, 5.0)

        def run(rank: int) -> None:
            with group.turn:
                memory = self.memory if rank == 0 else []
                try:
                    ranks = Ranks(group.of(rank), RankRows())
                    self.found[rank] = share_own_pools(ranks, self.kvs[rank], memory, has_checksums=True)
                except Exception as error:
                    self.found[rank] = error
                    group.end()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def pools(self) -> OwnCudaPools:
        assert list(map(type, (self.found[rank] for rank in range(SIZE)))) == [OwnCudaPools, type(None), type(None)]
        return self.found[0]


def _random(layout: KvLayout, seed: int) -> torch.Tensor:
    dtype = getattr(torch, layout.planes[0].dtype)
    return torch.randn(layout.stacked_shape(NUM_PAGES), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_pages_of_all_ranks_have_one_space_of_numbers(world: World) -> None:
    world.meet()
    pools, pages = world.pools, [2 * NUM_PAGES + 3, 5, NUM_PAGES + 5, 2 * NUM_PAGES]
    alone = [pools._pools[page // NUM_PAGES].digest([page % NUM_PAGES])[0] for page in pages]
    assert len(set(alone)) == 4 and pools.digest(pages) == alone
    begun = pools.begin_digest(pages)
    assert not begun.is_done
    begun.wait()
    assert begun.is_done and begun.checksums() == alone


def test_pages_go_through_the_mirror_of_all_ranks(world: World) -> None:
    world.meet()
    pages = [2 * NUM_PAGES + 3, 5, NUM_PAGES + 5]
    digests = world.pools.digest(pages)
    world.pools.store(pages)
    for place, memory in enumerate(world.memory):
        for page in pages:
            rank, own = divmod(page, NUM_PAGES)
            there = world.kvs[rank][place][:, own].reshape(len(memory.pages), -1).view(torch.uint8)
            assert torch.equal(torch.from_numpy(memory.pages)[:, page], there)
        assert memory.pages.any(axis=(0, 2)).nonzero()[0].tolist() == sorted(pages)
    before = [[kv.clone() for kv in kvs] for kvs in world.kvs]
    for page in pages:
        for kv in world.kvs[page // NUM_PAGES]:
            kv[:, page % NUM_PAGES] = 0
    assert world.pools.load(pages) == digests
    for kvs, old in zip(world.kvs, before, strict=True):
        assert all(map(torch.equal, kvs, old))


def test_a_gather_writes_into_the_pools_of_the_ranks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the peer is the node itself: a rank gets pages of another rank."""
    from baton.kernels.state import triton_pages
    from baton.kernels.state.pages import gather_pages_ref

    def gather_pages(peer: Any, pool: torch.Tensor, sources: Any, targets: Any, *_: Any) -> None:
        [there] = [kv for kvs in world.kvs for kv in kvs if kv.data_ptr() == peer.address]
        there = there.view(*there.shape[:2], -1).view(torch.int32)
        gather_pages_ref(there, pool.view(*pool.shape[:2], -1), sources, targets, None)

    monkeypatch.setattr(triton_pages, "gather_pages", gather_pages)
    by_number = [kv for kvs in world.kvs for kv in kvs]
    monkeypatch.setattr(
        cuda_pool, "map_shared", lambda number, size, _: Mapped(by_number[number].data_ptr(), size, world.closed)
    )
    world.meet()
    sizes = [kv.nbytes for kv in world.kvs[0]]
    mapping = world.pools.map(range(len(by_number)), sizes, SIZE * NUM_PAGES)
    world.pools.expect([NUM_PAGES + 1, 4])
    sources, targets = [2 * NUM_PAGES + 3, 6, NUM_PAGES + 2], [NUM_PAGES + 1, 2 * NUM_PAGES + 7, 4]
    wanted = world.pools.digest(sources)
    gather = world.pools.gather(mapping, sources, targets)
    gather.wait()
    assert gather.checksums() == wanted == world.pools.digest(targets)
    world.cuda.log.clear()
    mapping.close()
    waits = [which for who, what, which in world.cuda.log if (who, what) == ("host", "waits for")]
    assert waits == [str(pool.stream) for pool in world.pools._pools], "gathers of all ranks have ended"
    assert len(world.closed) == len(by_number)


def test_without_memory_for_one_rank_nothing_is_under_way(world: World) -> None:
    world.meet()
    first, second, _ = world.pools._pools
    begun = first.begin_digest([1])
    first.begin_digest = lambda pages: begun  # type: ignore[method-assign]
    with MemoryLimit(64), pytest.raises(OutOfMemory, match="the checksums of 20 pages"):
        world.pools.begin_digest([1, *[NUM_PAGES] * 20])
    assert begun.is_done and second.stream is not first.stream


def test_a_peer_gets_the_pools_of_all_ranks_in_order(world: World) -> None:
    world.meet()
    addresses = [int(os.pread(each.descriptor, 100, 0)) for each in world.pools.shared]
    assert addresses == [kv.data_ptr() for kvs in world.kvs for kv in kvs]
    assert [each.size for each in world.pools.shared] == [kv.nbytes for kvs in world.kvs for kv in kvs]


def test_nothing_stays_mapped_or_open_after_the_end(world: World) -> None:
    world.meet()
    places = [Path(f"/proc/self/fd/{each.descriptor}") for each in world.pools.shared]
    assert len(places) == SIZE * len(LAYOUTS) and all(place.is_symlink() for place in places)
    world.pools.close()
    world.pools.close()
    assert sorted(world.closed) == sorted(kv.data_ptr() for kvs in world.kvs[1:] for kv in kvs)
    assert not any(place.is_symlink() for place in places), "a descriptor would keep the memory allocated"


@pytest.mark.parametrize("rank", [0, 2])
def test_pools_that_a_rank_cannot_share(rank: int, world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 hands its own pages over by way of the host, and so those of the others. Another rank is needed."""
    world.cannot.append(world.kvs[rank][1])
    world.meet()
    if rank == 0:
        assert world.pools.shared == () and "the pools cannot be shared" in caplog.text
        return
    error = world.found[rank]
    assert isinstance(error, ConfigError), error
    assert "rank 2 cannot share its KV pools with rank 0, which hands them over: no file descriptor; use" in str(error)
    assert isinstance(world.found[0], Exception) and not world.closed
