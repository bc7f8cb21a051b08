"""The pools of ranks with sequences of their own are parts of one memory, which rank 0 hands over."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from thread_ranks import ThreadGroup

from baton.engine.products.ranked import RankRows
from baton.engine.ranks.ranks import Ranks
from baton.engine.state.own_pools import OwnPages, share_pools
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.memory import PageMemory, PeerMemory
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.wire.node_info import PoolLayout

NUM_PAGES, PAGE_SIZE = 5, 4
LAYOUTS = [KvLayout.of(PoolLayout(layers, heads, 8, "float32"), PAGE_SIZE) for layers, heads in ((3, 2), (1, 4))]


class Shared(NamedTuple):
    """What one rank got."""

    own: list[OwnPages]
    memory: list[PageMemory]


def on_ranks(size: int, make: Callable[[Ranks], Shared]) -> list[Shared | BaseException]:
    """Call `make` on all ranks at once."""
    group, found = ThreadGroup(size, 5.0), dict[int, Shared | BaseException]()

    def run(rank: int) -> None:
        with group.turn:
            try:
                found[rank] = make(Ranks(group.of(rank), RankRows()))
            except BaseException as error:
                found[rank] = error
                group.end()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


def shared(ranks: Ranks) -> Shared:
    return Shared(*share_pools(ranks, LAYOUTS, NUM_PAGES))


def test_a_page_of_a_rank_has_its_place_in_the_memory_of_rank_0() -> None:
    ranks = on_ranks(3, shared)
    assert all(isinstance(each, Shared) for each in ranks), ranks
    first = ranks[0]
    assert isinstance(first, Shared)
    assert [memory.num_pages for memory in first.memory] == [3 * NUM_PAGES] * 2
    for rank, each in enumerate(ranks):
        assert isinstance(each, Shared) and (rank == 0 or not each.memory), "rank 0 alone hands over"
        for own, memory in zip(each.own, first.memory, strict=True):
            assert own.pages.shape == (own.layout.num_layers, NUM_PAGES, own.layout.page_layer_bytes)
            assert all(layer.flags.c_contiguous for layer in own.pages)
            own.pages[:, 2] = 10 + rank
            assert (memory.pages[:, rank * NUM_PAGES + 2] == 10 + rank).all()
            memory.pages[:, rank * NUM_PAGES + 3] = 20 + rank
            assert (own.pages[:, 3] == 20 + rank).all()
    for memory in first.memory:
        memory.close()


def test_only_the_ranks_can_write_the_memory() -> None:
    """A peer maps it for reading. It is sealed once all ranks have mapped it."""
    first, _ = on_ranks(2, shared)
    assert isinstance(first, Shared)
    target = first.memory[0]
    assert target.fd is not None
    with pytest.raises(PermissionError):
        mmap.mmap(target.fd, target.size)
    peer = PeerMemory(os.getpid(), target.fd, target.size, target.layout, target.num_pages)
    first.own[0].pages[:] = 7
    assert np.array_equal(peer.pages, target.pages)
    peer.close()
    for memory in first.memory:
        memory.close()


def test_ranks_need_memory_that_processes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    first, other = on_ranks(2, shared)
    assert isinstance(first, ConfigError) and "no memory that processes share, which ranks need" in str(first)
    assert isinstance(other, RuntimeError), "it does not wait for ever"
