"""Copies of a GPU's pages to the host tier and back, with tensors of the host in the place of device memory
(support/devices/host_cuda.py): which bytes go where, and what waits for what. tests/gpu/test_host_tier_cuda.py runs
them on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_cuda import HostCuda, with_host_cuda

from baton.engine.tiers import cuda_copies
from baton.engine.tiers.cuda_copies import CudaCopies
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.wire.node_info import PoolLayout

LAYOUTS = [KvLayout.of(PoolLayout(num_layers, 2, 4, "float32"), 4) for num_layers in (3, 1, 2)]
NUM_PAGES, NUM_TAILS, NUM_SLOTS, NUM_TAIL_SLOTS = 9, 5, 7, 4


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> HostCuda:
    return with_host_cuda(monkeypatch)


def make() -> tuple[CudaCopies, list[PageMemory], list[torch.Tensor]]:
    memory = [PageMemory(layout, NUM_PAGES) for layout in LAYOUTS[:2]]
    memory.append(PageMemory(LAYOUTS[2], NUM_TAILS, NUM_PAGES))
    kvs = [torch.randint(0, 256, each.pages.shape, dtype=torch.uint8) for each in memory]
    return CudaCopies(kvs, memory, NUM_SLOTS, NUM_TAIL_SLOTS), memory, kvs


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_bytes_come_back_into_other_pages(cuda: HostCuda, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "_BUFFER_BYTES", buffer_bytes)
    copies, _, kvs = make()
    assert cuda.num_pinned == 2
    before = [kv.clone() for kv in kvs]
    copies.store([2, 5, 1], [6, 0, 3])
    copies.store([NUM_PAGES + 1, NUM_PAGES + 4], [NUM_SLOTS + 2, NUM_SLOTS])
    for kv in kvs:
        kv.random_(0, 256)
    after = [kv.clone() for kv in kvs]
    copies.load([0, 6, 3], [7, 8, 2])
    copies.load([NUM_SLOTS, NUM_SLOTS + 2], [NUM_PAGES + 2, NUM_PAGES + 3])
    for place, moves in ((0, {5: 7, 2: 8, 1: 2}), (1, {5: 7, 2: 8, 1: 2}), (2, {4: 2, 1: 3})):
        for source, target in moves.items():
            assert torch.equal(kvs[place][:, target], before[place][:, source])
        others = np.setdiff1d(np.arange(kvs[place].shape[1]), list(moves.values()))
        assert torch.equal(kvs[place][:, others], after[place][:, others]), "no other page was written"


def test_a_page_is_written_again_after_its_copy_and_read_after_its_load(cuda: HostCuda) -> None:
    copies, _, _ = make()
    side = str(copies._stream)
    cuda.log.clear()
    copies.store([2], [0])
    assert cuda.log == [(side, "waits for", "main"), ("main", "waits for", side)]
    cuda.log.clear()
    copies.load([0], [3])
    first, begun, done, last = cuda.log
    assert first == (side, "waits for", "main") and last == ("main", "waits for", side)
    assert begun[:2] == done[:2] == (side, "records")
    assert not copies.is_settled and copies.take_loads() == []
    copies._loads[0].done.synchronize()
    assert copies.is_settled
    assert [tuple(each) for each in copies.take_loads()] == [(1, 0.002)]
    assert not any(who == "host" and whom != done[2] for who, _, whom in cuda.log)


def test_copies_ahead_hold_nothing_up_until_a_page_is_evicted(cuda: HostCuda) -> None:
    copies, _, _ = make()
    side = str(copies._stream)
    cuda.log.clear()
    copies.store([2], [0], is_ahead=True)
    assert [entry for entry in cuda.log if entry[0] == "main"] == []
    event = cuda.log[-1][2]
    assert cuda.log[-1] == (side, "records", event)
    copies.await_ahead()
    assert cuda.log[-1] == ("main", "waits for", event)
    num_entries = len(cuda.log)
    copies.await_ahead()
    assert len(cuda.log) == num_entries
