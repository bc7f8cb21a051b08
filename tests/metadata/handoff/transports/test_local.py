"""Pages copied in place out of a peer's mapped pool."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from handoff_nodes import DRAFT_SCHEMA, make_memory, make_welcome, same_pages, unit

from baton.metadata.errors import ProtocolError, TransferError
from baton.metadata.handoff.memory_places import send_memory
from baton.metadata.handoff.schema.schema import page_bytes
from baton.metadata.handoff.transports.base import Move, PullEnd
from baton.metadata.handoff.transports.local import LocalTransport
from baton.metadata.wire.data_link import LinkWelcome, Pages


def ignore(_: object) -> None:
    """Stand for the link's `send`, which these transports do not use."""


@pytest.fixture
def pools() -> Iterator[tuple]:
    source, target = make_memory(DRAFT_SCHEMA, 16, seed=4), make_memory(DRAFT_SCHEMA, 24)
    yield source, target
    for pool in (*source, *target):
        pool.close()


def welcome(source) -> LinkWelcome:
    return make_welcome(LinkWelcome, source, "local")


def test_pages_of_all_pools_land_with_their_generation(pools):
    source, target = pools
    gc.collect()  # pools of other tests
    before = Path("/proc/self/maps").read_text().count("baton-pages")
    transport = LocalTransport.open(PullEnd(tuple(target), ignore), welcome(source))
    source[0].generations[5] = 8
    transport.fetch([Move(unit(), 0, 5, 20, 8, b""), Move(unit(), 1, 6, 21, 0, b"")])
    assert transport.is_busy
    landed = list(transport.step(1 << 30))
    assert [(item.move.index, item.generation) for item in landed] == [(0, 8), (1, 0)]
    assert same_pages(target, [20, 21], source, [5, 6]) and not transport.is_busy
    assert int(sum(pool.pages.any(axis=(0, 2)).sum() for pool in target)) == 4
    transport.close()
    assert Path("/proc/self/maps").read_text().count("baton-pages") == before > 0, "unmapped at once"


def test_the_pool_is_unmapped_if_the_link_is_lost_between_two_pages(pools):
    source, target = pools
    transport = LocalTransport.open(PullEnd(tuple(target), ignore), welcome(source))
    transport.fetch([Move(unit(), i, i + 1, i + 1, 0, b"") for i in range(3)])
    step = transport.step(1 << 30)
    assert next(step).move.index == 0
    transport.close()  # an ack of the first page found its queue full
    assert list(step) == []


def test_a_step_copies_a_bounded_number_of_bytes(pools):
    source, target = pools
    transport = LocalTransport.open(PullEnd(tuple(target), ignore), welcome(source))
    transport.fetch([Move(unit(), i, i + 1, i + 1, 0, b"") for i in range(5)])
    assert [len(list(transport.step(2 * page_bytes(DRAFT_SCHEMA)))) for _ in range(3)] == [2, 2, 1]
    transport.close()


def test_pages_that_were_given_up_are_not_copied(pools):
    source, target = pools
    transport = LocalTransport.open(PullEnd(tuple(target), ignore), welcome(source))
    transport.fetch([Move(unit("a"), 0, 1, 1, 0, b""), Move(unit("b"), 0, 2, 2, 0, b"")])
    transport.forget(unit("a"))
    assert [item.move.unit.rid for item in transport.step(1 << 30)] == ["b"]
    assert not any(pool.pages[:, 1].any() for pool in target)
    transport.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"fds": (), "sizes": ()},
            "2 pools here, 0 descriptors with 0 sizes .*: start both nodes with the same --speculative",
        ),
        ({"num_pages": 17}, "17 pages of this layout have"),
        ({"sizes": (1, 2)}, "has 1 bytes"),
        ({"pid": 1 << 40}, "cannot open"),
    ],
)
def test_a_failed_mapping_leaves_nothing_mapped(pools, changes, words):
    source, target = pools
    with pytest.raises(TransferError, match=words):
        LocalTransport.open(PullEnd(tuple(target), ignore), msgspec.structs.replace(welcome(source), **changes))


def test_pools_whose_descriptors_came_to_the_inbox_are_mapped_from_there(pools, inbox):
    source, target = pools
    token = send_memory(inbox.address, [pool.where for pool in source])
    elsewhere = msgspec.structs.replace(welcome(source), pid=1 << 40, token=token)  # of another process namespace
    transport = LocalTransport.open(PullEnd(tuple(target), ignore, inbox=inbox), elsewhere)
    transport.fetch([Move(unit(), 0, 5, 20, 0, b"")])
    assert [item.move.index for item in transport.step(1 << 30)] == [0]
    assert same_pages(target, [20], source, [5])
    transport.close()


def test_the_second_pool_failing_unmaps_the_first(pools):
    source, target = pools
    good = welcome(source)
    bad = msgspec.structs.replace(good, fds=(good.fds[0], 1 << 20))
    maps = Path("/proc/self/maps")
    gc.collect()  # pools of other tests
    before = maps.read_text().count("baton-pages")
    with pytest.raises(TransferError, match="cannot open"):
        LocalTransport.open(PullEnd(tuple(target), ignore), bad)
    assert maps.read_text().count("baton-pages") == before > 0


def test_a_message_with_pages_is_refused(pools):
    source, target = pools
    transport = LocalTransport.open(PullEnd(tuple(target), ignore), welcome(source))
    with pytest.raises(ProtocolError, match="local"):
        transport.receive(Pages(unit=unit(), indices=b"", generations=b""), memoryview(b""))
    transport.close()
