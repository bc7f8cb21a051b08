"""Pages reused during a pull: the generation or checksum shows it, and the decode node repeats the pull.

Both nodes run here, over sockets in memory and clocks that only the test moves, so that each race happens exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, same_pages, unit
from wire import Wire

from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived, Revoked, TransferFailed
from baton.metadata.wire.data_link import Ack, Claim, Drop, LinkHello, Pull, Renew, RevokeAck, to_prefill_decoder
from baton.metadata.wire.frames import decode_frame, encode
from baton.metadata.wire.request import pack_ids


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Race:
    """A ticket with source pages 5 and 6, offered whole and claimed into pages 9 and 4. No page has been pulled."""

    def __init__(self, transport: str, pages: tuple[int, ...] = (5, 6)) -> None:
        self.wire = Wire()
        self.prefill_clock, self.decode_clock = Clock(), Clock()
        context: Any = self.wire
        self.server, self.source = make_server(context=context, clock=self.prefill_clock)
        self.client, self.target = make_client(context=context, clock=self.decode_clock, transports=(transport,))
        self.ended: list[TicketEnded] = []
        self.events: list[Any] = []
        self.server.open(unit(), 2, "d1" * 8)
        self.server.offer(unit(), [0, 1], pages, [1, 1])
        self.client.claim(unit(), peer_of(self.server), 0, [9, 4])
        self.prefill()
        self.decode()  # welcomed: claims
        self.prefill()
        self.server.finish(unit(), make_row(SCHEMA))

    def prefill(self, after_s: float = 0.0) -> None:
        """Step the prefill node after some time of its own clock."""
        self.prefill_clock.now += after_s
        self.ended += named(self.server.poll(), TicketEnded)

    def decode(self, after_s: float = 0.0) -> None:
        self.decode_clock.now += after_s
        self.events += self.client.poll()

    def both(self, turns: int = 8) -> None:
        for _ in range(turns):
            self.decode()
            self.prefill()

    def reuse(self) -> None:
        """Give the pages to another request, with other contents."""
        for pool in self.source:
            pool.pages[:, [5, 6]] ^= 0xFF
        self.source[0].generations[[5, 6]] += 1

    def close(self) -> None:
        for node in (self.client, self.server, *self.source, *self.target):
            node.close()


@pytest.fixture(params=["local", "zmq"])
def race(request: pytest.FixtureRequest) -> Iterator[Race]:
    race = Race(request.param)
    yield race
    race.close()


def test_without_a_race_the_pages_arrive(race: Race) -> None:
    race.both()
    assert [type(event) for event in race.events] == [Arrived]
    assert [ended.how for ended in race.ended] == ["acked"]
    assert same_pages(race.target, [9, 4], race.source, [5, 6])


@pytest.mark.parametrize("end", ["lease", "closed epoch", "revoke and lease"])
def test_a_decode_node_that_was_away_never_uses_pages_of_another_life(race: Race, end: str) -> None:
    """The node was stopped, suspended or in a long step. It wakes up with everything of the old ticket."""
    if end == "closed epoch":
        race.server.close_peer("d1" * 8)
    if end == "revoke and lease":
        race.server.revoke(unit(), False, "cancelled")
    for _ in range(12):
        race.prefill(0.1)
    assert len(race.ended) == 1 and race.server.tickets() == []
    race.reuse()
    race.both()
    assert not named(race.events, Arrived), "pages of another request were used"
    assert len(named(race.events, (TransferFailed, Revoked))) == 1 and race.client.tickets() == []
    assert len(race.ended) == 1


@pytest.mark.parametrize("what", ["generation", "contents"])
def test_a_page_used_again_in_the_middle_of_its_copy_is_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The generation is read after the copy, so a half-old copy shows the new generation. If the new life has no
    number, because of a fault of ours, the checksum shows it."""
    monkeypatch.setattr("baton.metadata.handoff.pull_link.DRAIN_LIMIT", 1)
    race = Race("local")

    class Torn:
        """The peer's pages. Their owner reuses one of them while its last layer is copied."""

        def __getitem__(self, key: Any) -> np.ndarray:
            copied = race.source[0].pages[key].copy()
            if what == "generation":
                race.source[0].generations[key[1]] += 1
            else:
                copied[-1] ^= 0xFF
            return copied

    transport: Any = race.client._links.by_epoch[race.server.end.epoch].transport
    transport._peers[0].pages = Torn()
    race.both()
    (failed,) = race.events
    assert isinstance(failed, TransferFailed)
    assert ("was reused: generation 2 there, 1 offered" if what == "generation" else "checksum") in failed.reason
    assert [ended.how for ended in race.ended] == ["dropped"]
    race.close()


def test_a_jump_of_the_decode_clock_costs_only_a_retry(race: Race) -> None:
    """The decode node's clock jumps by an hour between two polls. The peer does not count as silent for it."""
    race.decode()
    race.decode(3600.0)
    race.both()
    assert [type(event) for event in race.events] == [Arrived]


def test_a_jump_of_the_prefill_clock_does_not_end_a_renewed_ticket(race: Race) -> None:
    """The prefill node's clock jumps by an hour. The renewal is read a moment later."""
    race.prefill(3600.0)
    assert race.server.tickets() == [unit()]
    race.decode(0.3)  # renews
    race.prefill(0.1)
    race.prefill(0.3)
    race.both()
    assert [type(event) for event in race.events] == [Arrived]
    assert [ended.how for ended in race.ended] == ["acked"]


def test_wall_clocks_do_not_matter(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    for wall in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        race.prefill()
        race.decode()
    race.both()
    assert [type(event) for event in race.events] == [Arrived]


# --- peers that end tickets ------------------------------------------------------------------------------------------


def hand(race: Race, epoch: str = "d7" * 8) -> Any:
    """A bare socket that acts as a decode node and has said hello."""
    dealer = race.wire.dealer(race.server.address)
    hello = race.client._links.hello
    fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
    dealer.send(encode(LinkHello(**fields | {"epoch": epoch, "node_id": "d7", "transports": ("zmq",)})))
    race.prefill()
    return dealer


def test_an_ack_that_comes_twice_ends_one_ticket_once(race: Race) -> None:
    race.wire.tamper = lambda _, frames: [frames, frames]
    race.both()
    assert [ended.how for ended in race.ended] == ["acked"]
    assert [type(event) for event in race.events] == [Arrived]


def test_an_ack_of_an_earlier_attempt_ends_nothing(race: Race) -> None:
    """The next attempt of the unit has its own ticket, even on the same link."""
    race.both()
    (ack,) = [frames for frames in race.client._links.by_epoch[race.server.end.epoch].socket.sent if _is(frames, Ack)]
    again = unit(attempt=1)
    race.server.open(again, 1, "d1" * 8)
    race.server.offer(again, [0], [7], [1])
    race.server.finish(again, make_row(SCHEMA))
    race.client.claim(again, peer_of(race.server), 0, [3])
    race.prefill()
    race.client._links.by_epoch[race.server.end.epoch].socket.send_multipart(ack)
    race.prefill()
    assert race.server.tickets() == [again]


def test_messages_of_an_earlier_epoch_end_no_ticket_of_the_next(race: Race) -> None:
    """A prefill node restarts at its address and opens a unit of the same name. Messages for the old link change
    nothing."""
    link = race.client._links.by_epoch[race.server.end.epoch].socket
    race.both(1)
    said = [frames for frames in link.sent if not _is(frames, LinkHello)]
    second, source = make_server(context=race.wire, clock=race.prefill_clock, epoch="e9" * 8)  # type: ignore[arg-type]
    second.open(unit(), 1)
    old = race.wire.dealer(second.address)
    for frames in said:
        old.send_multipart(frames)
    old.send(encode(Ack(unit=unit())))
    assert second.poll() == [] and second.tickets() == [unit()] and second.dropped.count == len(said) + 1
    for node in (second, *source):
        node.close()


def test_only_the_claimant_moves_a_ticket(race: Race) -> None:
    thief = hand(race)
    for message in (
        Claim(unit=unit(), num_cached_pages=0),
        Ack(unit=unit()),
        Drop(unit=unit(), reason="mine"),
        RevokeAck(unit=unit()),
        Renew(units=(unit(),)),
        Pull(unit=unit(), indices=pack_ids([0, 1])),
    ):
        thief.send(encode(message))
        race.prefill()
    assert race.server.tickets() == [unit()] and not race.ended
    race.both()
    assert [type(event) for event in race.events] == [Arrived]


def test_a_ticket_that_was_never_claimed_is_not_for_strangers() -> None:
    race = Race("zmq")
    race.server.open(unit("next"), 1, "d1" * 8)
    thief = hand(race)
    thief.send(encode(Claim(unit=unit("next"), num_cached_pages=0)))
    race.prefill()
    assert race.server.dropped.count == 1
    race.client.claim(unit("next"), peer_of(race.server), 0, [20])
    race.server.offer(unit("next"), [0], [7], [1])
    race.server.finish(unit("next"), make_row(SCHEMA))
    race.both()
    assert {event.unit.rid for event in named(race.events, Arrived)} == {"r", "next"}
    race.close()


def test_one_link_is_one_node(race: Race) -> None:
    """A second hello may change the transport, but not the node's name or the number of answers that may wait."""
    thief = hand(race)
    holder = thief.holder
    known = race.server._links.peers.by_link[holder]
    hello = race.client._links.hello
    fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
    thief.send(encode(LinkHello(**fields)))
    race.prefill()
    assert race.server.dropped.count == 1 and race.server._links.peers.by_link[holder] is known
    thief.send(encode(LinkHello(**fields | {"epoch": "d7" * 8, "node_id": "d7", "transports": ("zmq",)})))
    race.prefill()
    assert race.server.dropped.count == 1 and race.server._links.peers.by_link[holder] is known


def test_a_peer_that_sends_only_junk_is_not_heard() -> None:
    """The peer owes pages, and junk does not count as an answer. So the claim fails in time."""
    race = Race("zmq")
    race.decode()  # pulls
    for _ in range(800):
        if not race.client.tickets():
            break
        holder = race.client._links.by_epoch[race.server.end.epoch].socket
        holder.inbox.clear()
        holder.inbox.append([b"junk"])
        race.decode(0.1)
    (failed,) = named(race.events, TransferFailed)
    assert "not answered a request for pages for 75 s" in failed.reason and race.client.dropped.count > 40
    race.close()


def test_a_flood_of_junk_does_not_keep_a_dead_nodes_pages(race: Race) -> None:
    junk = hand(race)
    start = race.prefill_clock.now
    while race.server.tickets():
        for _ in range(300):  # more than is read in a poll
            junk.send(b"junk")
        race.prefill(0.1)
        assert race.prefill_clock.now - start < 2.0
    assert [ended.how for ended in race.ended] == ["lease"]


def _is(frames: list[bytes], kind: type) -> bool:
    return isinstance(decode_frame(to_prefill_decoder, frames[0]), kind)
