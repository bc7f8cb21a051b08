"""The links of a decode node: one per epoch of a prefill node, with one inbox for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from handoff_nodes import make_client

from baton.metadata.errors import TransferError
from baton.metadata.handoff.descriptors import new_token, send_descriptors
from baton.metadata.handoff.pull_link import BUSY_FACTOR, HANDSHAKE_FACTOR
from baton.metadata.handoff.pull_links import AWAY_S, PullLinks
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.protocol import PROTOCOL_MAX

ANSWER_S = 5.0


class Links:
    """The links, their clock, and an address where a peer listens and says nothing."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], has_gpu: bool) -> None:
        self.now = 100.0
        self.peer = context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.peer.bind_to_random_port('tcp://127.0.0.1')}"
        transports = ("cuda", "local", "zmq") if has_gpu else ("local", "zmq")
        client, self.memory = make_client(
            has_gpu=has_gpu, transports=transports, clock=lambda: self.now, context=context
        )
        self.all: PullLinks = client._links

    def open(self, node_id: str = "p0", epoch: str = "e0") -> Any:
        return self.all.open(Peer(node_id=node_id, epoch=epoch, data_address=self.address, protocol=PROTOCOL_MAX))

    def close(self) -> None:
        self.all.close_all()
        self.peer.close(linger=0)


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def links(request: pytest.FixtureRequest) -> Iterator[Links]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        links = Links(context, request.param)
        yield links
        links.close()


def test_an_epoch_has_one_link(links: Links) -> None:
    link = links.open()
    assert links.open() is link and links.open(epoch="e1") is not link
    assert len(links.all.sockets()) == 4
    links.all.close(link)
    assert link.lost is not None and list(links.all) == [links.open(epoch="e1")]


def test_the_time_of_a_handshake_is_remembered_by_name(links: Links) -> None:
    link = links.open()
    link._advance(HANDSHAKE_FACTOR)
    links.now += 1.5
    link._advance(BUSY_FACTOR)
    links.all.close(link)
    assert links.open(epoch="e1").handshake_s == 1.5 and links.open("p1", "e2").handshake_s == 0.0


def test_other_epochs_of_the_same_node(links: Links) -> None:
    old, new = links.open(epoch="e0"), links.open(epoch="e1")
    links.open("p1", "e2")
    assert links.all.other_epochs(new.peer) == [old] and links.all.other_epochs(old.peer) == [new]


def test_an_address_that_cannot_be_used_leaves_no_link(links: Links) -> None:
    with pytest.raises(TransferError, match="cannot open a link"):
        links.all.open(Peer(node_id="p0", epoch="e0", data_address="tcp://nowhere", protocol=PROTOCOL_MAX))
    assert not list(links.all) and links.all.sockets() == []


@pytest.mark.parametrize(("away_s", "is_lost"), [(ANSWER_S, True), (1000.0, False)])
def test_a_peer_is_not_blamed_for_the_time_in_which_nobody_polled(links: Links, away_s: float, is_lost: bool) -> None:
    """Polls that follow each other blame the peer; one long pause does not."""
    link = links.open()
    num_polls = 1 if away_s > ANSWER_S else int((BUSY_FACTOR + 2 * HANDSHAKE_FACTOR) * ANSWER_S / AWAY_S)
    for _ in range(num_polls):
        links.now += away_s if num_polls == 1 else AWAY_S
        links.all.begin_poll()
        link.expect_answer(links.now, is_used=True)
        link.check(links.now)
    assert (link.lost is not None) == is_lost


def test_descriptors_that_nobody_took_are_closed_once_no_link_opens() -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        links = Links(context, has_gpu=True)
        link = links.open()  # still waits for its welcome, so for descriptors
        ours, theirs = os.pipe()
        send_descriptors(links.all.hello.inbox, new_token(), [theirs])
        os.close(theirs)
        os.set_blocking(ours, False)
        links.now += 10
        links.all.begin_poll()
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)  # a copy of the other end is still open
        links.all.close(link)
        assert os.read(ours, 1) == b"", "the last copy of the other end is closed"
        os.close(ours)
        links.close()
