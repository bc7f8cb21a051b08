"""A lost or damaged message on an open data link delays the transfer but does not end it.

Both nodes run here, over sockets in memory and a clock that only the test moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, same_pages, unit
from wire import Wire

from baton.metadata.handoff.client import ANSWER_S, MAX_ASKED
from baton.metadata.handoff.pull_link import BUSY_FACTOR
from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived, Revoked, TransferFailed
from baton.metadata.handoff.transports import zmq as zmq_transport
from baton.metadata.wire.data_link import LinkHello, LinkWelcome, Offer, Pages, to_decode_decoder, to_prefill_decoder
from baton.metadata.wire.frames import decode_frame, encode

TURN_S = 0.05
Change = Callable[[list[bytes]], list[list[bytes]]]


def lose(frames: list[bytes]) -> list[list[bytes]]:
    return []


def double(frames: list[bytes]) -> list[list[bytes]]:
    return [frames, frames]


def cut_short(frames: list[bytes]) -> list[list[bytes]]:
    """Shorten the raw frame, which has no checksum of its own."""
    return [[*frames[:-1], frames[-1][:-7]]]


class Nodes:
    """A prefill and a decode node with a data link. `change` alters the next message of a type."""

    def __init__(self) -> None:
        self.wire: Any = Wire()
        self.now = 100.0
        common: dict[str, Any] = {"context": self.wire, "clock": lambda: self.now}
        self.server, self.source = make_server(**common)
        self.client, self.target = make_client(**common, transports=("zmq",))
        self.events: list[Any] = []
        self.changes: dict[type, Change] = {}
        self.wire.tamper = self._tamper

    def change(self, kind: type, change: Change) -> None:
        self.changes[kind] = change

    def start(self, rid: str, page: int, num_pages: int = 1) -> None:
        """Open a ticket, claim it, and offer all of it."""
        pages = list(range(page, page + num_pages))
        self.server.open(unit(rid), num_pages, "d1" * 8)
        self.server.offer(unit(rid), list(range(num_pages)), pages, [1] * num_pages)
        self.server.finish(unit(rid), make_row(SCHEMA))
        self.client.claim(unit(rid), peer_of(self.server), 0, pages)

    def turn(self, *, is_computing: bool = False) -> None:
        """Let both nodes poll once. `is_computing`: the prefill node is in a step."""
        self.now += TURN_S
        self.events += self.client.poll()
        self.events += [] if is_computing else self.server.poll()
        for link in self.client._links.by_epoch.values():
            inbox = link.socket.inbox  # type: ignore[attr-defined]
            arrived, come = list(inbox), list[Any]()
            inbox.clear()
            for frames in arrived:
                come += self._changed(frames, to_decode_decoder)
            inbox.extend(come)

    def until(self, condition: Callable[[], Any], within_s: float) -> float:
        """Step both nodes until the condition holds. Return the seconds that it took."""
        begun = self.now
        while not condition():
            self.turn()
            assert self.now - begun <= within_s, self.events
        return self.now - begun

    def arrived(self) -> set[str]:
        assert not named(self.events, TransferFailed), self.events
        return {event.unit.rid for event in named(self.events, Arrived)}

    def _tamper(self, _holder: bytes, frames: list[bytes]) -> list[list[bytes]]:
        return self._changed(frames, to_prefill_decoder)

    def _changed(self, frames: list[bytes], decoder: Any) -> list[list[bytes]]:
        kind = type(decode_frame(decoder, frames[0]))
        return self.changes.pop(kind)(frames) if kind in self.changes else [frames]

    def close(self) -> None:
        for node in (self.client, self.server, *self.source, *self.target):
            node.close()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(zmq_transport, "MESSAGE_BYTES", 1)  # a page is a message
    nodes = Nodes()
    nodes.start("before", 20)
    nodes.until(lambda: nodes.arrived() == {"before"}, 1.0)
    yield nodes
    nodes.close()


@pytest.mark.parametrize("change", [lose, cut_short])
def test_pages_that_a_busy_link_has_lost_are_asked_for_again(nodes: Nodes, change: Change) -> None:
    """Answers come in the order of the questions, so an answer that was passed over will not come."""
    nodes.change(Pages, change)
    nodes.start("r", 5, num_pages=3)
    took_s = nodes.until(lambda: nodes.arrived() >= {"r"}, 1.0)
    assert took_s < 1.0 and same_pages(nodes.target, [5, 6, 7], nodes.source, [5, 6, 7])


@pytest.mark.parametrize("change", [lose, cut_short])
def test_a_claim_fails_if_its_pages_do_not_come_though_other_messages_do(nodes: Nodes, change: Change) -> None:
    """Other units are claimed and revoked all the time, but the pages of this unit do not come."""
    nodes.change(Pages, change)
    nodes.start("r", 5)
    begun, number = nodes.now, 0
    while not named(nodes.events, TransferFailed):
        number += 1
        nodes.server.open(unit(f"u{number}"), 1, "d1" * 8)
        nodes.client.claim(unit(f"u{number}"), peer_of(nodes.server), 0, [40])
        nodes.turn()
        nodes.server.revoke(unit(f"u{number}"), True)
        nodes.turn()
        assert nodes.now - begun < ANSWER_S + 1.0, "the unit waits for ever"
    assert len(named(nodes.events, Revoked)) > 20
    (failed, *_) = named(nodes.events, TransferFailed)
    assert failed.unit == unit("r") and "answers small messages, but pages" in failed.reason and not failed.is_refused


LONG_STEP_S = 8.0  # beyond ANSWER_S


@pytest.mark.parametrize("is_first", [True, False])
def test_a_peer_in_a_long_step_is_waited_for(is_first: bool, nodes: Nodes) -> None:
    """The prefill node reads nothing during its step: neither the first hello nor requests for pages. Router and decode
    node ask again meanwhile, and nothing is called lost."""
    at = Nodes() if is_first else nodes
    at.start("r", 5, num_pages=6)
    if not is_first:
        at.turn()  # the offer comes; its pages are asked for next
    begun = at.now
    while at.now - begun < LONG_STEP_S:
        at.turn(is_computing=True)
        if (at.now - begun) % 2.0 < TURN_S:
            assert at.client.ask_offers(unit("r"))
    assert not named(at.events, TransferFailed)
    assert at.until(lambda: at.arrived() >= {"r"}, 1.0) <= 1.0
    assert same_pages(at.target, [5, 6, 7], at.source, [5, 6, 7])
    at.until(lambda: named(at.events, TicketEnded), 1.0)
    assert {event.how for event in named(at.events, TicketEnded)} == {"acked"}
    if is_first:
        at.close()


def test_a_peer_whose_loop_hangs_is_given_up_in_the_end(nodes: Nodes) -> None:
    nodes.start("r", 5)
    nodes.turn()  # the offer comes; its pages are asked for next
    begun = nodes.now
    while not named(nodes.events, TransferFailed):
        nodes.turn(is_computing=True)
        assert nodes.now - begun < (BUSY_FACTOR + 1) * ANSWER_S
    (failed,) = named(nodes.events, TransferFailed)
    assert "is connected and has not answered a request for pages for 75 s" in failed.reason


def test_offers_that_are_lost_are_missed_though_the_peer_answers(nodes: Nodes) -> None:
    """The peer sends other messages after each question, so it has read the question."""

    def lose_all(frames: list[bytes]) -> list[list[bytes]]:
        nodes.change(Offer, lose_all)
        return []

    nodes.change(Offer, lose_all)
    nodes.start("r", 5)
    for number in range(MAX_ASKED):
        assert nodes.client.ask_offers(unit("r"))
        nodes.turn()
        nodes.server.open(unit(f"u{number}"), 1, "d1" * 8)
        nodes.client.claim(unit(f"u{number}"), peer_of(nodes.server), 0, [40])
        nodes.turn()
        nodes.server.revoke(unit(f"u{number}"), True)
        nodes.turn()
    assert not nodes.client.ask_offers(unit("r"))


@pytest.mark.parametrize("kind", [LinkHello, LinkWelcome])
def test_a_hello_without_an_answer_is_repeated(kind: type) -> None:
    nodes = Nodes()
    nodes.change(kind, lose)
    nodes.start("r", 5)
    assert nodes.until(lambda: nodes.arrived() == {"r"}, 2.0) > 0.5
    nodes.close()


@pytest.mark.parametrize("kind", [LinkHello, LinkWelcome])
def test_a_doubled_hello_or_welcome_changes_nothing(kind: type) -> None:
    nodes = Nodes()
    nodes.change(kind, double)
    nodes.start("r", 5)
    nodes.until(lambda: nodes.arrived() == {"r"}, 1.0)
    nodes.until(lambda: named(nodes.events, TicketEnded), 1.0)
    assert nodes.client.dropped.count == nodes.server.dropped.count == 0
    assert nodes.client.dropped.num_stale == 1
    nodes.close()


def test_another_welcome_still_ends_the_link(nodes: Nodes) -> None:
    (holder,) = nodes.server.socket.peers  # type: ignore[attr-defined]
    welcome = LinkWelcome(node_id="p0", epoch=nodes.server.end.epoch, transport="zmq", lease_s=9.0, num_pages=32)
    nodes.start("r", 5)
    nodes.server.socket.send_multipart([holder, encode(welcome)])
    nodes.until(lambda: named(nodes.events, TransferFailed), 1.0)
    assert "out of turn" in named(nodes.events, TransferFailed)[0].reason
