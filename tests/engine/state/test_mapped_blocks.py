"""The meeting of ranks that map each other's memory. Files stand for device memory here; tests/gpu/test_cuda_group.py
has the real one."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import ThreadGroup

from baton.engine.state import mapped_blocks
from baton.engine.state.mapped_blocks import MappedBlocks
from baton.kernels.ranks.all_reduce import BLOCK_BYTES, CONTROL
from baton.metadata.errors import TransferError
from baton.metadata.handoff.pages import Shared

SIZE = 3


class Mapping:
    """A mapping of a file whose content is the address."""

    def __init__(self, descriptor: int, is_writable: bool) -> None:
        self.address = int(os.pread(descriptor, 100, 0))
        self.is_writable, self.is_open = is_writable, True

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[Mapping]:
    """The mappings that were made."""
    found: list[Mapping] = []

    def share(own: torch.Tensor) -> Shared:
        descriptor = os.memfd_create("block")
        os.write(descriptor, str(own.data_ptr()).encode())
        return Shared(descriptor, own.nbytes)

    def map_shared(descriptor: int, size: int, device: object, *, is_writable: bool) -> Mapping:
        assert size == BLOCK_BYTES
        found.append(Mapping(descriptor, is_writable))
        return found[-1]

    monkeypatch.setattr(mapped_blocks, "share", share)
    monkeypatch.setattr(mapped_blocks, "map_shared", map_shared)
    monkeypatch.setattr(mapped_blocks, "shareable_zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(mapped_blocks, "pinned_zeros", lambda count: torch.zeros(count, dtype=torch.int64))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return found


def on_all_ranks(make: Callable[[Any], MappedBlocks]) -> list[Any]:
    """Return the memory of each rank, or the error."""
    group, found = ThreadGroup(SIZE, timeout_s=10), dict[int, Any]()

    def run(rank: int) -> None:
        with group.turn:
            try:
                found[rank] = make(group.of(rank))
            except Exception as error:
                found[rank] = error
                group.end()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(SIZE)]


def num_open() -> int:
    gc.collect()  # what earlier tests left open would be closed at any time
    return len(list(Path("/proc/self/fd").iterdir()))


def test_every_rank_maps_all_others(mapped: list[Mapping]) -> None:
    before = num_open()
    ranks = on_all_ranks(lambda host: MappedBlocks(host, torch.device("cpu"), 2.5))
    addresses = [each.blocks.own.data_ptr() for each in ranks]
    assert len(set(addresses)) == SIZE and len(mapped) == SIZE * (SIZE - 1)
    for rank, each in enumerate(ranks):
        assert each.blocks.rank == rank and each.blocks.addresses.tolist() == addresses
        assert each.blocks.control.tolist() == [0, 2_500_000_000]
    assert all(each.is_writable and each.is_open for each in mapped)
    assert num_open() == before
    for each in ranks:
        each.close()
        each.close()
        assert each.blocks.control[CONTROL.has_failed] == 1
    assert not any(each.is_open for each in mapped)


def test_a_rank_that_cannot_map_keeps_nothing(mapped: list[Mapping], monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, lock = num_open(), mapped_blocks.map_shared, threading.Lock()

    def map_shared(*args: Any, **kwargs: Any) -> Any:
        with lock:
            if len(mapped) == 3:
                raise TransferError("no peer access")
            return real(*args, **kwargs)

    monkeypatch.setattr(mapped_blocks, "map_shared", map_shared)
    ranks = on_all_ranks(lambda host: MappedBlocks(host, torch.device("cpu"), 1.0))
    assert any(isinstance(each, TransferError) for each in ranks)
    assert all(isinstance(each, Exception) for each in ranks), ranks
    assert not any(each.is_open for each in mapped) and num_open() == before
