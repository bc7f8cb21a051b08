"""Handoffs between nodes whose ranks are processes: only the two ranks 0 exchange tickets."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from forked import fork_context
from handoff_nodes import make_row, unit
from rank_nodes import (
    ProcessLine,
    arrived,
    heads_schema,
    rank_end,
    run_prefill_node,
    run_puller,
    until,
)

from baton.engine.ranks.handoff_line import HandoffLine, RankHandoff
from baton.engine.ranks.work_frames import encode
from baton.metadata.errors import RankLost
from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.nixl_agents import has_nixl
from baton.metadata.handoff.ranks.orders import ExpectPages, OfferDigests, PullOrder, SourceLost
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.wire.node_info import HandoffSchema, Peer

SOURCES, TARGETS = [2, 3, 5, 8], [9, 1, 4, 12]
# ranks of prefill, ranks of decode, heads of the target, heads of the draft
SIZES = [(1, 2, 4, 2), (2, 1, 4, 2), (2, 3, 6, 1), (2, 4, 2, 4)]
TRANSPORTS = ("local", "zmq", *(["nixl"] if has_nixl() else []))
IS_WHOLE = "BATON_WHOLE_MATRIX" in os.environ  # otherwise each of SIZES and each rank meets one transport


class Prefill(NamedTuple):
    pipe: Any
    process: Any
    peer: Peer
    rank_pids: list[int]

    def events_until(self, how: str) -> list[Any]:
        """Return the events of the process until a ticket ends in this way."""
        events: list[Any] = []
        while not events or events[-1][1] != how:
            assert self.pipe.poll(20), events
            events.append(self.pipe.recv())
        return events


@contextmanager
def prefill_node(
    schema: HandoffSchema, size: int, spoilt: int | None = None, *, endless: bool = False
) -> Iterator[Any]:
    context = fork_context()
    pipe, theirs = context.Pipe()
    process = context.Process(target=run_prefill_node, args=(theirs, schema, size, SOURCES, spoilt, endless))
    process.start()
    try:
        assert pipe.poll(60)
        yield Prefill(pipe, process, *pipe.recv())
        if process.is_alive():
            pipe.send("over")
        process.join(20)
    finally:
        process.kill()
        process.join()


@contextmanager
def decode_node(schema: HandoffSchema, size: int, transport: str) -> Iterator[Any]:
    ranks = ProcessLine(size, run_puller, schema, size, transport, (TARGETS, SOURCES))
    end = rank_end(schema, Shard(0, size), "decode", transports=(transport,))
    client = HandoffClient(end, line=ranks.line.pulling if size > 1 else None)
    try:
        yield client, end, ranks
    finally:
        client.close()
        ranks.close()
        for pool in end.memory:
            pool.close()


@pytest.mark.parametrize(
    ("sizes", "transport"),
    [
        (sizes, each)
        for i, sizes in enumerate(SIZES)
        for j, each in enumerate(TRANSPORTS)
        if IS_WHOLE or (i - j) % 2 == 0
    ],
    ids=str,
)
def test_pages_go_from_rank_to_rank(sizes: tuple[int, int, int, int], transport: str) -> None:
    """Each rank is a process, and each has its heads of both pools in the end, byte for byte."""
    num_prefill, num_decode, target, draft = sizes
    schema = heads_schema(target, draft)
    with prefill_node(schema, num_prefill) as prefill, decode_node(schema, num_decode, transport) as decode:
        client, end, ranks = decode
        client.claim(unit(), prefill.peer, 0, TARGETS)
        event = until(client, (Arrived, TransferFailed))
        assert isinstance(event, Arrived) and event.row == make_row(schema), event
        assert arrived(end, schema, TARGETS, SOURCES)
        for work in ranks.work:
            work.send_bytes(b"")
            assert work.recv(), "a rank has not all of its heads, or has written other pages"
        pids = {prefill.process.pid, *prefill.rank_pids, os.getpid(), *(each.pid for each in ranks.processes)}
        assert len(pids) == num_prefill + num_decode
        assert prefill.events_until("acked")[-1][0] == unit()


@pytest.mark.parametrize(
    ("spoilt", "transport"),
    [(rank, each) for rank in (0, 1) for i, each in enumerate(TRANSPORTS) if IS_WHOLE or i % 2 == rank],
)
def test_one_wrong_byte_of_one_rank_is_caught(spoilt: int, transport: str) -> None:
    schema = heads_schema(6, 6)
    with prefill_node(schema, 2, spoilt) as prefill, decode_node(schema, 3, transport) as (client, *_):
        client.claim(unit(), prefill.peer, 0, TARGETS)
        event = until(client, (Arrived, TransferFailed))
        # the last block of the rank's draft: V of head 2 or 5, behind three layers of the target
        block = 3 * 12 + 6 + (2, 5)[spoilt]
        assert isinstance(event, TransferFailed), event
        assert f"page 1 from node p0: checksum of block {block} wrong 3 times" in event.reason
        assert prefill.events_until("dropped")[-1][0] == unit() and not client.tickets()


@pytest.mark.parametrize("transport", ["local", "zmq"])
def test_the_death_of_a_prefill_rank_ends_the_link(transport: str) -> None:
    schema = heads_schema(6, 6)
    with prefill_node(schema, 2, endless=True) as prefill, decode_node(schema, 3, transport) as (client, end, ranks):
        client.claim(unit(), prefill.peer, 0, TARGETS)
        deadline = time.monotonic() + 20
        while not end.memory[0].pages[:, TARGETS[2]].any() and time.monotonic() < deadline:
            client.poll()
        os.kill(prefill.rank_pids[0], signal.SIGKILL)
        event = until(client, (Arrived, TransferFailed))
        assert isinstance(event, TransferFailed) and not event.is_refused, event
        link = r"node p0: (its rank [01], on the link of rank [012]: )?"
        ends = r"(the connection was closed|it cannot be|the handshake failed|cannot open the peer's pool)"
        assert re.match(link + ends, event.reason), event  # the other ranks' links may not have been made yet
        assert not client.tickets() and client.sockets() == ranks.line.pulling.descriptors()
        prefill.process.kill()


def test_the_death_of_a_decode_rank_is_told() -> None:
    schema = heads_schema(6, 6)
    with prefill_node(schema, 2, endless=True) as prefill, decode_node(schema, 3, "local") as (client, _, ranks):
        client.claim(unit(), prefill.peer, 0, TARGETS)
        client.poll()
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        ranks.processes[1].join(10)
        with pytest.raises(RankLost, match="rank 2 is gone"):
            until(client, (Arrived, TransferFailed))


def test_reports_come_with_their_rank_to_the_end_of_their_kind_and_do_not_block() -> None:
    """What the other end has read from the pipes is still told, though no pipe is readable any more."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    sent: list[Any] = []
    line = HandoffLine(lambda rank, order: sent.append((rank, order)), [hears for hears, _ in pipes])
    serving, pulling = line.serving, line.pulling
    assert serving.size == pulling.size == 3 and serving.receive() == pulling.receive() == []
    assert serving.descriptors() == pulling.descriptors() == [hears.fileno() for hears, _ in pipes]
    pulling.send(2, ExpectPages([1]))
    assert sent == [(2, ExpectPages([1]))]
    digests, lost = [OfferDigests(1, b"12345678"), OfferDigests(2, b"")], SourceLost("e" * 16, 1, "gone", False)
    for report in (*digests, lost):
        pipes[1][1].send_bytes(encode(report))
    assert pulling.receive() == [(2, lost)] and serving.has_reports and not pulling.has_reports
    assert serving.receive() == [(2, report) for report in digests] and not serving.has_reports
    pipes[0][1].close()
    for end in (serving, pulling):
        with pytest.raises(RankLost, match="rank 1 is gone"):
            end.receive()


class Talker:
    """A member with much to say, and no links."""

    orders = PullOrder

    def __init__(self, reports: list[Any]) -> None:
        self.reports, self.done = reports, list[Any]()

    def do(self, order: Any) -> None:
        self.done.append(order)

    def poll(self) -> list[Any]:
        reports, self.reports = self.reports, []
        return reports

    def sockets(self) -> list[Any]:
        return []

    def wait_s(self) -> float | None:
        return None


def test_a_rank_does_not_wait_until_its_reports_are_read() -> None:
    """Rank 0 may read nothing while it waits for this rank in an operation of the group."""
    ours, theirs = multiprocessing.Pipe()
    hears, says = multiprocessing.Pipe(duplex=False)
    reports = [OfferDigests(number, bytes(1 << 20)) for number in range(3)]
    member = Talker(list(reports))
    handoff = RankHandoff(theirs, says, member)
    ours.send_bytes(b"work")
    handoff.wait()
    assert theirs.recv_bytes() == b"work"
    handoff.do(ExpectPages([1]))
    assert member.done == [ExpectPages([1])]
    line = HandoffLine(lambda rank, order: None, [hears])
    received: list[Any] = []
    deadline = time.monotonic() + 20
    while len(received) < 3 and time.monotonic() < deadline:
        received += line.serving.receive()
    assert received == [(1, report) for report in reports]
    ours.close()
    handoff.wait()
    with pytest.raises(EOFError):
        theirs.recv_bytes()
