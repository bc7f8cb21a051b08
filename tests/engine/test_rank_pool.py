"""Pages of a node with ranks: whole in the mirror, each rank's heads in memory of its own, with the same checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from baton.engine.rank_pool import RankMemory, RankPool
from baton.metadata.errors import TransferError
from baton.metadata.handoff.checksums import page_checksums
from baton.metadata.handoff.kv_layout import KvLayout
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.wire.node_info import PoolLayout

NUM_PAGES, PAGE_SIZE = 6, 4


def _layout(num_layers: int, num_kv_heads: int) -> KvLayout:
    return KvLayout.of(PoolLayout(num_layers, num_kv_heads, 8, "float32"), PAGE_SIZE)


class Ranks:
    """Pools of a target with 2 KV heads and a drafter with 4, of `size` ranks, all in this process."""

    def __init__(self, size: int, *, has_checksums: bool = True) -> None:
        self.mirror = [PageMemory(_layout(layers, heads), NUM_PAGES) for layers, heads in ((3, 2), (1, 4))]
        self.ranks = [
            [RankMemory(_layout(3, max(1, 2 // size)), NUM_PAGES), RankMemory(_layout(1, max(1, 4 // size)), NUM_PAGES)]
            for _ in range(size)
        ]
        self.pool = RankPool(self.mirror, self.ranks, has_checksums=has_checksums)

    def fill(self) -> None:
        """Write random bytes into the mirror."""
        rng = np.random.default_rng(3)
        for memory in self.mirror:
            memory.pages[:] = rng.integers(0, 256, memory.pages.shape, dtype=np.uint8)

    def heads(self, rank: int, pool: int, page: int) -> np.ndarray:
        """Return a rank's page of a pool, [num_layers, 2, num_heads, block_bytes]."""
        memory = self.ranks[rank][pool]
        num_heads = memory.layout.planes[0].num_heads
        return memory.pages[:, page].reshape(memory.layout.num_layers, 2, num_heads, -1)

    def close(self) -> None:
        for memory in (*self.mirror, *(each for own in self.ranks for each in own)):
            memory.close()


@pytest.fixture(params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """1, 2 and 4 ranks: with 4, two ranks have the same head of the target."""
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def test_pages_that_came_go_to_the_ranks_of_their_heads_and_back(ranks: Ranks) -> None:
    ranks.fill()
    came = [memory.pages.copy() for memory in ranks.mirror]
    checksums = ranks.pool.load([4, 1])
    assert checksums == [page_checksums(ranks.mirror, page) for page in (4, 1)] == ranks.pool.digest([4, 1])
    size = len(ranks.ranks)
    for index, num_heads in ((0, 2), (1, 4)):
        whole = ranks.mirror[index].pages[:, 4].reshape(ranks.mirror[index].layout.num_layers, 2, num_heads, -1)
        for rank in range(size):
            share = max(1, num_heads // size)
            first = rank * num_heads // size
            assert np.array_equal(ranks.heads(rank, index, 4), whole[:, :, first : first + share])
    assert not any(memory.pages[:, 2].any() for own in ranks.ranks for memory in own), "page 2 did not come"
    for memory in ranks.mirror:
        memory.pages[:] = 0
    ranks.pool.store([1, 4])
    for memory, pages in zip(ranks.mirror, came, strict=True):
        assert np.array_equal(memory.pages[:, [1, 4]], pages[:, [1, 4]]) and not memory.pages[:, 2].any()


def test_a_checksum_is_that_of_the_ranks_own_bytes(ranks: Ranks) -> None:
    """A byte that changes in a rank changes one checksum, and the mirror does not hide it."""
    ranks.fill()
    [before] = ranks.pool.load([3])
    ranks.ranks[-1][1].pages[0, 3, -1] ^= 1  # the last head of the drafter's V
    [after] = ranks.pool.digest([3])
    assert before[:-8] == after[:-8] and before[-8:] != after[-8:]


def test_without_checksums_pages_travel_all_the_same() -> None:
    ranks = Ranks(2, has_checksums=False)
    ranks.fill()
    assert ranks.pool.load([1]) == [b""]
    assert ranks.heads(1, 0, 1).any()
    ranks.close()


def test_memory_of_a_rank_is_shared_with_a_process_that_opens_it_and_keeps_its_size() -> None:
    memory = RankMemory(_layout(2, 1), NUM_PAGES)
    path = f"/proc/{os.getpid()}/fd/{memory.fd}"
    other = RankMemory(_layout(2, 1), NUM_PAGES, lambda _size: os.open(path, os.O_RDWR))
    memory.pages[1, 2] = 7
    other.pages[0, 5] = 9
    assert (other.pages[1, 2] == 7).all() and (memory.pages[0, 5] == 9).all()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory.fd, 1)
    other.close()
    memory.close()


def test_no_gpu_can_map_the_pools_of_ranks() -> None:
    ranks = Ranks(2)
    assert not ranks.pool.shared
    with pytest.raises(TransferError, match="1 pools of 9 pages"):
        ranks.pool.map([3], [100], 9)
    ranks.close()
