"""A message about a ticket that has ended counts as late, not as malformed: cancels and lost acks cause such messages.

Both nodes run here, over real sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from faulty_process import FaultyProcess
from handoff_nodes import PREFILL_EPOCH, SCHEMA, make_client, make_row, make_server, named, peer_of, unit
from patience import Patience
from wire import Wire

from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived, Revoked, TransferFailed
from baton.metadata.wire.data_link import LinkWelcome, Offer, Revoke, UnknownClaim
from baton.metadata.wire.frames import encode
from baton.metadata.wire.node_info import Peer

NUM_PAGES = 4


class Transfer:
    """A ticket of four pages; `prefill` and `decode` are its two nodes."""

    def __init__(self, transport: str) -> None:
        self.prefill, self.source = make_server()
        self.decode, self.target = make_client(transports=(transport,))
        self.both = [self.prefill, self.decode]
        self.events: list[Any] = []
        self.num_offered = 0

    def until(self, condition: Callable[[], Any]) -> None:
        patience = Patience(20.0)
        while not condition():
            self.events += [event for node in self.both for event in node.poll()]
            assert not patience.is_over(), self.events
            time.sleep(0.0005)

    def claim(self) -> None:
        self.decode.claim(unit(), peer_of(self.prefill), 0, [9, 4, 7, 3])

    def link(self) -> None:
        """Let the two nodes meet."""
        self.decode.claim(unit("before"), peer_of(self.prefill), 0, [20])
        self.until(lambda: any(link.transport for link in self.decode._links.by_epoch.values()))
        self.decode.drop(unit("before"), "it is over")
        self.until(lambda: not self.prefill._book._parked)

    def open(self) -> None:
        self.prefill.open(unit(), NUM_PAGES, "d1" * 8)

    def offer(self) -> None:
        """Offer one more page."""
        self.prefill.offer(unit(), [self.num_offered], [5 + self.num_offered], [1])
        self.num_offered += 1

    def finish(self) -> None:
        while self.num_offered < NUM_PAGES:
            self.offer()
        self.prefill.finish(unit(), make_row(SCHEMA))

    def has_claimed(self) -> bool:
        ticket = self.prefill._book.get(unit())
        return ticket is not None and ticket.holder is not None

    @property
    def num_dropped(self) -> int:
        return self.prefill.dropped.count + self.decode.dropped.count

    def close(self) -> None:
        for node in (*self.both, *self.source, *self.target):
            node.close()


@pytest.fixture(params=["local", "zmq"])
def transfer(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Transfer]:
    caplog.set_level(logging.INFO)
    transfer = Transfer(request.param)
    yield transfer
    transfer.close()


def greeted(transfer: Transfer) -> None:
    """The link is being opened."""
    transfer.open()
    transfer.claim()


def parked(transfer: Transfer) -> None:
    """The claim waits at the prefill node, which does not know the unit yet."""
    transfer.link()
    transfer.claim()
    transfer.until(lambda: transfer.prefill._book._parked)
    transfer.open()


def claimed(transfer: Transfer) -> None:
    transfer.link()
    transfer.open()
    transfer.claim()
    transfer.until(transfer.has_claimed)


def offered(transfer: Transfer) -> None:
    claimed(transfer)
    transfer.offer()
    transfer.until(lambda: transfer.decode._transfers[unit()]._offered)


def pulling(transfer: Transfer) -> None:
    """The prefill node has offered more pages, and the decode node has not read the offer."""
    offered(transfer)
    transfer.offer()
    transfer.prefill.poll()


def finished(transfer: Transfer) -> None:
    """The last offer is on its way."""
    claimed(transfer)
    transfer.finish()


def arrived(transfer: Transfer) -> None:
    """The ack is on its way."""
    finished(transfer)
    while not named(transfer.events, Arrived):
        transfer.events += transfer.decode.poll()
        if transfer.decode.tickets():
            transfer.events += transfer.prefill.poll()


PHASES = (greeted, parked, claimed, offered, pulling, finished, arrived)


@pytest.mark.parametrize("first", ["decode", "prefill"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_cancel_in_any_phase_drops_no_frame(
    transfer: Transfer, phase: Callable[[Transfer], None], first: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both nodes hear of the cancel from the router while messages of the other node are on their way."""
    phase(transfer)
    hears = {
        "decode": lambda: transfer.decode.drop(unit(), "cancelled"),
        "prefill": lambda: transfer.prefill.revoke(unit(), False, "cancelled"),
    }
    hears.pop(first)()
    for hear in hears.values():
        hear()
    transfer.until(lambda: not transfer.prefill.tickets() and not transfer.decode.tickets())
    end = time.monotonic() + 0.2  # what is on its way arrives
    transfer.until(lambda: time.monotonic() > end)
    assert len(named(transfer.events, TicketEnded)) == 1
    assert transfer.num_dropped == 0 and "dropped a frame" not in caplog.text


def test_a_revoke_after_a_lost_ack_drops_no_frame(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = FaultyProcess(monkeypatch, tmp_path)
    process.plan(frames={"drop": 1.0}, tags=("ack",))
    transfer = Transfer("local")
    finished(transfer)
    transfer.until(lambda: named(transfer.events, TicketEnded))
    transfer.until(lambda: transfer.decode.dropped.num_stale + transfer.num_dropped)
    assert [type(event) for event in named(transfer.events, (Arrived, Revoked, TransferFailed))] == [Arrived]
    assert process.noted() == [("drop", "out:ack", 0)]
    assert transfer.num_dropped == 0 and "dropped a frame" not in caplog.text
    transfer.close()


def test_a_decode_node_that_asks_for_offers_of_a_revoked_ticket_hears_the_revoke_again(transfer: Transfer) -> None:
    """Its question crosses the cancel, or the revoke was lost."""
    offered(transfer)
    transfer.decode.ask_offers(unit())
    transfer.prefill.revoke(unit(), True, "it is complete")
    transfer.until(lambda: named(transfer.events, TicketEnded))
    transfer.until(lambda: named(transfer.events, Revoked))
    assert named(transfer.events, Revoked) == [Revoked(unit(), True, "it is complete")]
    assert transfer.num_dropped == 0


def test_a_flood_of_late_messages_costs_neither_memory_nor_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    wire: Any = Wire()
    prefill = wire.socket(zmq.ROUTER)
    prefill.bind("tcp://127.0.0.1:*")
    decode, target = make_client(context=wire, transports=("zmq",), clock=lambda: 100.0)
    decode.claim(unit(), Peer(node_id="p0", epoch=PREFILL_EPOCH, data_address=prefill.address), 0, [3])
    (holder,) = prefill.peers
    welcome = LinkWelcome(node_id="p0", epoch=PREFILL_EPOCH, transport="zmq", lease_s=1.0, num_pages=32)
    prefill.send_multipart([holder, encode(welcome)])
    decode.poll()
    num_sent = len(prefill.peers[holder].sent)
    for number in range(3000):
        late = unit(f"u{number}")
        for message in (
            Revoke(unit=late, finished=False, reason="x"),
            UnknownClaim(unit=late),
            Offer(unit=late, num_pages=1, indices=b"", pages=b"", generations=b"", checksums=b"", row=None),
        ):
            prefill.send_multipart([holder, encode(message)])
        assert decode.poll() == []
    while prefill.peers[holder].inbox:
        assert decode.poll() == []
    assert decode.dropped.num_stale == 9000 and decode.dropped.count == 0
    assert decode.tickets() == [unit()] and len(prefill.peers[holder].sent) == num_sent
    assert not [record for record in caplog.records if "u2" in record.getMessage()]
    for node in (decode, *target):
        node.close()
