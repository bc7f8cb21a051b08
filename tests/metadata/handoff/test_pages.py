"""Pages of a node's pools, in host memory and on a GPU: checksums once per generation, copies only when due."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fake_device import FakeDevice
from handoff_nodes import DRAFT_SCHEMA, make_memory

from baton.metadata.errors import OutOfMemory
from baton.metadata.handoff.memory import PageMemory, pack_pages
from baton.metadata.handoff.pages import OfferedPages, ReceivedPages, page_checksums
from baton.metadata.handoff.schema.schema import blocks_per_page, on_gpu


@pytest.fixture
def memory() -> Iterator[list[PageMemory]]:
    pools = make_memory(DRAFT_SCHEMA, 8, seed=1)
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def device(memory: list[PageMemory]) -> Iterator[FakeDevice]:
    fake = FakeDevice(memory, has_checksums=True, seed=2)
    yield fake


def test_checksums_are_computed_once_per_generation(memory: list[PageMemory]) -> None:
    offered = OfferedPages(DRAFT_SCHEMA, memory, None)
    first = offered.checksums([3, 5], [1, 1])
    assert first == [page_checksums(memory, 3), page_checksums(memory, 5)]
    memory[0].pages[0, 3, 0] ^= 1
    assert offered.checksums([3], [1]) == first[:1]  # an offered page is not written, so nothing is computed anew
    assert offered.checksums([3], [2]) == [page_checksums(memory, 3)] != first[:1]


def test_checksums_that_were_begun_are_waited_for_and_not_computed_again(
    memory: list[PageMemory], device: FakeDevice
) -> None:
    offered = OfferedPages(on_gpu(DRAFT_SCHEMA), memory, device)
    expected = OfferedPages(on_gpu(DRAFT_SCHEMA), memory, device).checksums([3, 5, 6], [1, 1, 2])
    device.calls.clear()
    device.is_slow = True
    offered.digest_ahead([3, 5], [1, 1])
    offered.digest_ahead([5, 6], [1, 2])
    assert device.called("begin_digest") == [3, 5, 6]
    assert offered.checksums([3], [1]) == expected[:1]
    assert device.num_waits == 1  # nobody waits for the second launch, which may follow a long chunk
    assert offered.checksums([5, 6, 3], [1, 2, 1]) == [*expected[1:], expected[0]]
    assert not device.called("digest")


def test_checksums_that_were_begun_are_of_one_generation(memory: list[PageMemory], device: FakeDevice) -> None:
    offered = OfferedPages(on_gpu(DRAFT_SCHEMA), memory, device)
    offered.digest_ahead([3], [1])
    device.pools[0][0, 3] ^= 1
    assert offered.checksums([3], [2]) == OfferedPages(on_gpu(DRAFT_SCHEMA), memory, device).checksums([3], [2])
    for age in range(3, 20):  # nobody asks for them
        offered.digest_ahead([3], [age])
    assert len(offered._begun) <= 4


def test_without_a_gpu_or_without_memory_no_checksums_are_begun(
    memory: list[PageMemory], device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    OfferedPages(DRAFT_SCHEMA, memory, None).digest_ahead([3], [1])
    offered = OfferedPages(on_gpu(DRAFT_SCHEMA), memory, device)

    def run_out(pages: object) -> None:
        raise OutOfMemory("no memory")

    monkeypatch.setattr(device, "begin_digest", run_out)
    offered.digest_ahead([3], [1])
    assert offered.checksums([3], [1]) and device.called("digest") == [3]


def test_a_frame_holds_the_pages_and_their_generations(memory: list[PageMemory]) -> None:
    memory[0].generations[[5, 3]] = [7, 8]
    frame, generations = OfferedPages(DRAFT_SCHEMA, memory, None).pack([5, 3])
    assert np.array_equal(frame, pack_pages(memory, [5, 3]))
    assert np.frombuffer(generations, "<i8").tolist() == [7, 8]


def test_pages_of_a_gpu_come_to_the_host_once_per_generation(memory: list[PageMemory], device: FakeDevice) -> None:
    offered = OfferedPages(on_gpu(DRAFT_SCHEMA), memory, device)
    memory[0].generations[[5, 3]] = 1
    offered.bring([5, 3, 5])
    offered.bring([3])
    assert sorted(device.called("store")) == [3, 5]
    memory[0].generations[3] = 2
    offered.bring([3, 5])
    assert sorted(device.called("store")) == [3, 3, 5]


def test_a_received_page_is_compared_block_by_block(memory: list[PageMemory]) -> None:
    received = ReceivedPages(DRAFT_SCHEMA, memory, None)
    offered = page_checksums(memory, 4)
    assert received.first_difference(4, None, offered) is None
    last = blocks_per_page(DRAFT_SCHEMA) - 1
    memory[-1].pages[-1, 4, -1] ^= 1
    assert received.first_difference(4, None, offered) == last
    assert received.first_difference(4, offered, offered) is None  # checksums of a transport are believed


def test_a_received_page_is_loaded_into_the_gpu_if_no_transport_checked_it(
    memory: list[PageMemory], device: FakeDevice
) -> None:
    received = ReceivedPages(on_gpu(DRAFT_SCHEMA), memory, device)
    [checksums] = device.load([4])
    assert received.first_difference(4, None, checksums) is None
    assert received.first_difference(4, checksums, checksums) is None
    assert device.called("load") == [4, 4]
