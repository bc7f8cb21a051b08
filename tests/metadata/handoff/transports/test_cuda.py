"""Pages gathered on a device at the device's own pace: which pages land, and when."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_device import FakeDevice
from handoff_nodes import DRAFT_SCHEMA, make_memory, make_welcome, unit

from baton.metadata.errors import TransferError
from baton.metadata.handoff.descriptor_inbox import DescriptorInbox, new_token, send_descriptors
from baton.metadata.handoff.schema.schema import page_bytes
from baton.metadata.handoff.transports import cuda
from baton.metadata.handoff.transports.base import Move, PullEnd
from baton.metadata.handoff.transports.cuda import MAX_UNDER_WAY, CudaTransport
from baton.metadata.wire.data_link import CudaWelcome
from baton.metadata.wire.node_info import DevicePools


def ignore(_: object) -> None:
    """Stand for the link's `send`, which these transports do not use."""


class Pools:
    def __init__(self) -> None:
        self.source, self.target = (FakeDevice(make_memory(DRAFT_SCHEMA, n), seed=s) for n, s in ((16, 4), (24, None)))
        self.inbox = DescriptorInbox()
        self.transport = self.map(self.welcome())
        self.target.is_slow = True

    def map(self, welcome: CudaWelcome) -> CudaTransport:
        return CudaTransport.open(PullEnd(tuple(self.target.memory), ignore, self.target, self.inbox), welcome)

    def welcome(self, sent: list[int] | None = None, **changes: Any) -> CudaWelcome:
        """Return a prefill node's welcome. `sent`: the descriptors that reach the inbox, the right ones by default."""
        token, shared = new_token(), self.source.shared
        send_descriptors(self.inbox.address, token, [each.descriptor for each in shared] if sent is None else sent)
        pools = DevicePools(device=self.source.device, sizes=tuple(each.size for each in shared), token=token)
        pools = msgspec.structs.replace(pools, **changes.pop("of_pools", {}))
        return make_welcome(CudaWelcome, self.source.memory[:1], "cuda", **{"pools": pools, **changes})

    def fetch(self, *pairs: tuple[int, int], **of: Any) -> None:
        self.transport.fetch([Move(unit(**of), index, *pair, 0, b"") for index, pair in enumerate(pairs)])

    def step(self) -> list[Any]:
        return list(self.transport.step(1 << 30))

    def is_same(self, targets: list[int], sources: list[int]) -> bool:
        pairs = zip(self.target.pools, self.source.pools, strict=True)
        return all(np.array_equal(ours[:, targets], theirs[:, sources]) for ours, theirs in pairs)

    @property
    def written(self) -> list[int]:
        return [page for page in range(24) if any(pool[:, page].any() for pool in self.target.pools)]

    def close(self) -> None:
        self.transport.close()
        self.inbox.close()
        for memory in (*self.source.memory, *self.target.memory):
            memory.close()


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.target.run()
    pools.close()


def test_a_page_lands_when_the_device_has_it_and_no_step_waits(pools: Pools) -> None:
    """The checksums are those of the decode node's copy. The generation is read after the copy."""
    pools.fetch((5, 20), (6, 21))
    assert pools.transport.is_busy
    assert pools.step() == pools.step() == [] and pools.written == []
    assert pools.transport.is_busy and pools.target.num_waits == 0, "the loop comes back for it"
    pools.source.memory[0].generations[5] = 8
    pools.target.run()
    landed = pools.step()
    assert [(item.move.target, item.generation) for item in landed] == [(20, 8), (21, 0)]
    assert [item.checksums for item in landed] == pools.source.digest([5, 6]) == pools.target.digest([20, 21])
    assert pools.is_same([20, 21], [5, 6]) and pools.written == [20, 21]
    assert not pools.transport.is_busy and pools.step() == [] and pools.target.num_waits == 0


class _SoonDone:
    """A gather that is done when it is asked for the third time."""

    def __init__(self, pools: Pools, gather: Any) -> None:
        self.pools, self.gather, self.num_asked = pools, gather, 0

    @property
    def is_done(self) -> bool:
        self.num_asked += 1
        if self.num_asked == 3:
            self.pools.target.run()
        return self.gather.is_done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gather, name)


@pytest.mark.parametrize("is_short", [True, False])
def test_a_short_launch_lands_in_the_step_that_begins_it(
    pools: Pools, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does not wait for a long launch, or for one that is queued behind another."""
    num_bytes = page_bytes(DRAFT_SCHEMA)
    monkeypatch.setattr(cuda, "SHORT_BYTES", num_bytes if is_short else num_bytes - 1)
    monkeypatch.setattr(cuda, "SHORT_WAIT_S", 60.0)
    real = pools.target.gather
    monkeypatch.setattr(pools.target, "gather", lambda *args: _SoonDone(pools, real(*args)))
    pools.fetch((5, 20))
    assert len(pools.step()) == is_short
    assert pools.transport.is_busy is not is_short and pools.target.num_waits == 0


def test_queued_pages_go_in_one_launch_and_later_ones_in_the_next(pools: Pools) -> None:
    for first in (1, 3, 5, 7):
        pools.fetch((first, first), (first + 1, first + 1))
        pools.step()
    launches = [pages for name, pages in pools.target.calls if name == "gather"]
    assert launches == [[1, 2], [3, 4]] and len(launches) == MAX_UNDER_WAY
    pools.target.run(1)
    assert [item.move.target for item in pools.step()] == [1, 2]
    assert [pages for name, pages in pools.target.calls if name == "gather"][2:] == [[5, 6, 7, 8]]


def test_a_launch_has_a_bounded_number_of_bytes(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "GATHER_BYTES", 2 * page_bytes(DRAFT_SCHEMA))
    pools.fetch(*((page, page) for page in range(1, 6)))
    landed: list[int] = []
    while pools.transport.is_busy:
        landed += [item.move.target for item in pools.step()]
        pools.target.run(1)
    assert landed == [1, 2, 3, 4, 5]
    assert [len(pages) for name, pages in pools.target.calls if name == "gather"] == [2, 2, 1]


def test_after_forget_nothing_of_the_unit_is_written_and_others_land(pools: Pools) -> None:
    """One launch has pages of both units. Queued pages never start; a launch under way is waited for."""
    pools.fetch((1, 1), (2, 2), rid="kept")
    pools.fetch((3, 3), rid="dropped")
    pools.step()
    pools.fetch((4, 4), rid="dropped")
    pools.transport.forget(unit("dropped"))
    assert pools.target.num_waits == 1 and 3 in pools.written
    pools.target.pools[0][:, [3, 4]] = 0x77  # its owner's again
    pools.target.run()
    assert [item.move.target for item in pools.step()] == [1, 2]
    pools.target.run()
    assert pools.step() == [] and (pools.target.pools[0][:, [3, 4]] == 0x77).all()


def test_forgetting_a_unit_that_is_not_under_way_does_not_wait(pools: Pools) -> None:
    pools.fetch((1, 1), rid="kept")
    pools.step()
    pools.fetch((3, 3), rid="dropped")
    pools.transport.forget(unit("dropped"))
    assert pools.target.num_waits == 0 and pools.written == []


def test_a_unit_claimed_again_lands_its_new_pages_only(pools: Pools) -> None:
    pools.fetch((1, 1))
    pools.step()
    pools.transport.forget(unit())
    pools.fetch((2, 2))
    pools.step()
    pools.target.run()
    assert [item.move.target for item in pools.step()] == [2]


def test_closing_waits_for_the_device_then_unmaps(pools: Pools) -> None:
    pools.fetch((1, 1))
    pools.step()
    [mapping] = pools.target.mappings
    pools.transport.close()
    assert mapping.is_closed and pools.target.num_waits == 1 and not pools.transport.is_busy
    pools.target.run()  # FakeDevice: nothing is read after the mapping was closed
    assert pools.step() == []


def test_the_link_can_be_closed_while_its_pages_are_taken(pools: Pools) -> None:
    pools.fetch((1, 1), (2, 2))
    pools.step()
    pools.target.run()
    seen = []
    for landed in pools.transport.step(1 << 30):
        seen.append(landed.generation)
        pools.transport.close()
    assert seen == [0, 0]


@pytest.mark.parametrize("what", ["token", "descriptor", "pool size", "num_pages", "fds", "pid", "size", "one pool"])
def test_a_failed_mapping_leaves_nothing_mapped_or_open(pools: Pools, what: str) -> None:
    descriptors, sizes = zip(*pools.source.shared, strict=True)
    changes: dict[str, Any] = {
        "token": {"of_pools": {"token": bytes(16)}},
        "descriptor": {"sent": [descriptors[0], os.open("/dev/null", os.O_RDONLY)]},
        "pool size": {"of_pools": {"sizes": (sizes[0], sizes[1] + 1)}},
        "num_pages": {"num_pages": 17},
        "fds": {"fds": ()},
        "pid": {"pid": 1 << 40},
        "size": {"sizes": (4096,)},
        "one pool": {"sent": [descriptors[0]], "of_pools": {"sizes": sizes[:1]}},
    }[what]
    gc.collect()  # what earlier tests have mapped
    before = Path("/proc/self/maps").read_text().count("baton-pages")
    welcome = pools.welcome(**changes)
    if "sent" in changes and what == "descriptor":
        os.close(changes["sent"][1])
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(TransferError):
        pools.map(welcome)
    assert len(pools.target.mappings) == 1
    assert Path("/proc/self/maps").read_text().count("baton-pages") == before > 0
    pools.inbox.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < num_open


def test_a_peer_s_pool_cannot_be_written(pools: Pools) -> None:
    [mapping] = pools.target.mappings
    with pytest.raises(ValueError, match="read-only"):
        mapping.pools[0][:] = 1
