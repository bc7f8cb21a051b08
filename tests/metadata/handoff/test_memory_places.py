"""Host memory is told of as /proc/PID/fd/FD, or its descriptors come to the inbox."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from handoff_nodes import DRAFT_SCHEMA, make_memory, make_welcome

from baton.metadata.errors import TransferError
from baton.metadata.handoff.descriptor_inbox import DescriptorInbox
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.memory_places import memory_places, send_memory
from baton.metadata.wire.data_link import LinkWelcome, RankWelcome
from baton.metadata.wire.node_info import HostMemory


@pytest.fixture
def pools() -> Iterator[list[PageMemory]]:
    pools = make_memory(DRAFT_SCHEMA, 16)
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def welcome(pools: list[PageMemory]) -> LinkWelcome:
    return make_welcome(LinkWelcome, pools, "local")


def _sent(welcome: LinkWelcome, inbox: DescriptorInbox, pools: list[PageMemory]) -> LinkWelcome:
    token = send_memory(inbox.address, [pool.where for pool in pools])
    return msgspec.structs.replace(welcome, token=token)


def test_without_a_token_the_places_are_those_of_the_other_process(pools: list[PageMemory]) -> None:
    welcome = make_welcome(RankWelcome, pools, "local", pid=5, generations=HostMemory(6, 7, 8))
    with memory_places(None, welcome) as places:
        assert places == [*((5, pool.fd, pool.size) for pool in pools), (6, 7, 8)]


def test_descriptors_of_the_inbox_are_those_of_the_pools_until_the_end_of_the_block(
    pools: list[PageMemory], welcome: LinkWelcome, inbox: DescriptorInbox
) -> None:
    with memory_places(inbox, _sent(welcome, inbox, pools)) as places:
        assert [(place.pid, place.size) for place in places] == [(os.getpid(), pool.size) for pool in pools]
        for place, pool in zip(places, pools, strict=True):
            assert pool.fd is not None and os.path.sameopenfile(place.fd, pool.fd) and place.fd != pool.fd
    for place in places:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(place.fd)


def test_descriptors_that_did_not_come_or_are_too_few_are_refused(
    pools: list[PageMemory], welcome: LinkWelcome, inbox: DescriptorInbox
) -> None:
    for told, where, words in (
        (_sent(welcome, inbox, pools[:1]), inbox, "names 2 pools and sent 1"),
        (msgspec.structs.replace(welcome, token=bytes(16)), inbox, "did not arrive"),
        (msgspec.structs.replace(welcome, token=bytes(16)), None, "no inbox"),
    ):
        with pytest.raises(TransferError, match=words), memory_places(where, told):
            pass


def test_pools_that_are_gone_are_not_sent(inbox: DescriptorInbox) -> None:
    with pytest.raises(TransferError, match="cannot open this node's own pools"):
        send_memory(inbox.address, [HostMemory(os.getpid(), 1 << 20, 64)])


def test_what_is_sent_cannot_be_written(pools: list[PageMemory], inbox: DescriptorInbox) -> None:
    (sent,) = inbox.take(send_memory(inbox.address, [pools[0].where]))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(sent, b"x", 0)
    writable = os.open(f"/proc/self/fd/{sent}", os.O_RDWR)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(writable, b"x", 0)
    os.close(writable)
    os.close(sent)
