"""The fault injector follows its plan file and damages what really passes through the product.

Every test sends its messages and pages through the product's own sockets and functions.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import zmq
from faulty import HOLD_S, Kind, Plan, Strike, Way
from faulty_process import FaultyProcess
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, same_pages, spin, unit
from key_files import Listed
from patience import wait_until
from tiered_node import PAGE as TIERED_PAGE
from tiered_node import Node as TieredNode

from baton.engine.tiers.host_tier import TimedLoad
from baton.metadata.bus.hub import Hub
from baton.metadata.bus.link import Link
from baton.metadata.bus.liveness import HeartbeatThread
from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.wire.membership import Heartbeat, HelloAgain
from baton.metadata.wire.messages import Cancelled, ToRouter
from baton.metadata.wire.node_info import Load

PEER = b"node:1"
COUNT = 20
SENT = {
    "in": [HelloAgain(router_epoch=f"e{i}") for i in range(COUNT)],
    "out": [Cancelled(rid=f"r{i}", attempt=0) for i in range(COUNT)],
}
TAG = {"in": "hello_again", "out": "cancelled"}
LOAD = Load(free_pages=1, running=0, waiting=0)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FaultyProcess:
    return FaultyProcess(monkeypatch, tmp_path)


QUIET_LOOKS = 50  # of at least 10 ms each, longer than the longest delay of a message


class Bus:
    """A hub and one node's link, connected."""

    def __init__(self) -> None:
        self.arrived: dict[Way, list[Any]] = {"in": [], "out": []}
        self.lost: list[bytes] = []
        self.hub = Hub("tcp://127.0.0.1:*", "e", None, self._take, self.lost.append)
        self.hub.start()
        self.link = Link(self.hub.address, "node", "1", None)

    def _take(self, _peer: bytes, message: ToRouter) -> None:
        self.arrived["out"].append(message)

    async def send(self, way: Way, messages: Sequence[Any]) -> list[Any]:
        """Send the messages. Returns those that arrived, once none has arrived for QUIET_LOOKS looks."""
        before, num_quiet = len(self.arrived[way]), 0
        for message in messages:
            _ = self.link.send(message) if way == "out" else self.hub.send(PEER, message)
        poller = zmq.Poller()
        poller.register(self.link.socket, zmq.POLLIN)
        while num_quiet < QUIET_LOOKS:
            num_quiet += 1
            poller.poll(5)  # as an idle node does
            num_known = sum(map(len, self.arrived.values()))
            self.arrived["in"] += self.link.receive()
            await asyncio.sleep(0.005)
            if sum(map(len, self.arrived.values())) > num_known:
                num_quiet = 0
        return self.arrived[way][before:]

    @property
    def num_dropped(self) -> dict[Way, int]:
        """Number of frames that the receiver refused, by direction."""
        return {"in": self.link.dropped_frames, "out": self.hub.dropped_frames}

    def close(self) -> None:
        self.link.close()
        self.hub.close()


@pytest.fixture
async def nodes_bus(process: FaultyProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bus]:
    monkeypatch.setattr("baton.metadata.bus.hub.ROUTER_HEARTBEAT_S", 1000.0)  # only the test sends messages
    bus = Bus()
    assert await bus.send("out", SENT["out"][:1]) == SENT["out"][:1]
    yield bus
    bus.close()


async def test_without_shares_everything_passes(nodes_bus: Bus) -> None:
    for way in get_args(Way):
        assert await nodes_bus.send(way, SENT[way]) == SENT[way]
    assert nodes_bus.num_dropped == {"in": 0, "out": 0}


EXPECTED: dict[str, Callable[[list[Any], list[Any]], bool]] = {
    "drop": lambda got, _: got == [],
    "duplicate": lambda got, sent: got == [each for each in sent for _ in range(2)],
    "reorder": lambda got, sent: got != sent and len(got) == COUNT and all(each in got for each in sent),
    "delay": lambda got, sent: got != sent and len(got) == COUNT and all(each in got for each in sent),
    "truncate": lambda got, _: got == [],
    "flip": lambda got, _: got == [],
}


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("kind", EXPECTED)
async def test_each_kind_of_fault_works_in_each_direction(
    process: FaultyProcess, nodes_bus: Bus, kind: str, way: Way
) -> None:
    process.plan(frames={kind: 1.0}, seed=5, most=COUNT)
    got = await nodes_bus.send(way, SENT[way])
    assert EXPECTED[kind](got, SENT[way]), got
    assert nodes_bus.num_dropped[way] == (COUNT if kind in ("truncate", "flip") else 0)
    assert process.noted() == [(kind, f"{way}:{TAG[way]}", 0)] * COUNT
    assert await nodes_bus.send(way, SENT[way]) == SENT[way], "the plan damages only as many as it says"


async def test_only_a_sender_meets_a_full_queue(process: FaultyProcess, nodes_bus: Bus) -> None:
    process.plan(frames={"full": 1.0}, most=3)
    assert await nodes_bus.send("out", SENT["out"]) == SENT["out"][3:] and nodes_bus.link.unsent == 3
    assert await nodes_bus.send("in", SENT["in"]) == SENT["in"]
    assert process.noted() == [("full", "out:cancelled", 0)] * 3


async def test_each_way_has_its_own_count_and_weight(process: FaultyProcess, nodes_bus: Bus) -> None:
    process.plan(frames={"drop": 1.0}, most=3)
    for way in get_args(Way):
        assert await nodes_bus.send(way, SENT[way]) == SENT[way][3:]
    process.plan(frames={"drop": 0.5}, weights={"in": 2.0, "out": 0.0})
    assert await nodes_bus.send("in", SENT["in"]) == []
    assert await nodes_bus.send("out", SENT["out"]) == SENT["out"]
    process.plan(frames={"drop": 1.0}, tags=("cancelled",))
    assert await nodes_bus.send("in", SENT["in"]) == SENT["in"]
    assert await nodes_bus.send("out", SENT["out"]) == []


@pytest.mark.timing
async def test_a_delayed_or_doubled_message_wakes_its_reader(process: FaultyProcess, nodes_bus: Bus) -> None:
    """libzmq has no input left for the socket, so neither a poll nor the file descriptor would wake its reader."""
    link, poller = nodes_bus.link, zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    for kind, limit in (("delay", 10), ("duplicate", 1)):
        process.plan(frames={kind: 1.0}, most=1)
        nodes_bus.hub.send(PEER, SENT["in"][0])
        got: list[Any] = []
        begun = time.perf_counter()
        while len(got) < (2 if kind == "duplicate" else 1):
            poller.poll(20_000)
            got += link.receive(limit)
        assert set(got) == {SENT["in"][0]} and time.perf_counter() - begun < 10


async def test_monitors_are_left_alone(process: FaultyProcess, nodes_bus: Bus) -> None:
    process.plan(frames={"drop": 1.0})
    nodes_bus.link.close()
    async with asyncio.timeout(10):
        while nodes_bus.lost != [PEER]:
            await asyncio.sleep(0.01)


async def test_heartbeats_are_dropped(process: FaultyProcess, nodes_bus: Bus) -> None:
    process.plan(frames={"drop": 1.0}, most=3)
    pulse = HeartbeatThread(nodes_bus.hub.address, "node", "1", None, load=LOAD, interval_s=0.01)
    pulse.start()
    async with asyncio.timeout(10):
        while not any(isinstance(message, Heartbeat) for message in nodes_bus.arrived["out"]):
            await asyncio.sleep(0.01)
    pulse.close()
    assert process.noted() == [("drop", "out:beat", 0)] * 3


async def test_the_plan_redirects_a_connection(process: FaultyProcess, nodes_bus: Bus) -> None:
    process.plan(connect={"tcp://127.0.0.1:9": nodes_bus.hub.address})
    nodes_bus.link.close()
    nodes_bus.link = Link("tcp://127.0.0.1:9", "node", "1", None)
    assert await nodes_bus.send("out", SENT["out"]) == SENT["out"]


async def test_names_of_listed_senders_survive(process: FaultyProcess, tmp_path: Path) -> None:
    listed = Listed(tmp_path / "allow-list", "router", "node")
    process.plan(frames=dict.fromkeys(get_args(Kind), 0.1), seed=3)
    got: list[Any] = []
    hub = Hub("tcp://127.0.0.1:*", "e", listed.of("router"), lambda *each: got.append(each), lambda _: None)
    hub.start()
    link = Link(hub.address, "node", "1", listed.of("node"))
    async with asyncio.timeout(20):
        while len(got) < COUNT:
            link.send(SENT["out"][0])
            link.receive()
            await asyncio.sleep(0.005)
    assert set(got) == {(PEER, SENT["out"][0])}
    link.close()
    hub.close()


class Transfer:
    """A prefill and a decode node. Pages 5 and 6 of a ticket are pulled into pages 9 and 4."""

    def __init__(self, transport: str, *, lease_s: float = 1.0) -> None:
        has_gpu = transport == "cuda"
        self.server, self.source = make_server(has_gpu=has_gpu, lease_s=lease_s)
        self.client, self.target = make_client(has_gpu=has_gpu, transports=(transport,))
        self.server.open(unit(), 2)
        self.server.offer(unit(), [0, 1], [5, 6], [1, 1])
        self.server.finish(unit(), make_row(SCHEMA))

    def spin(self, *kinds: type) -> list[Any]:
        return spin([self.server, self.client], lambda events: all(named(events, kind) for kind in kinds))

    def claim(self) -> None:
        self.client.claim(unit(), peer_of(self.server), 0, [9, 4])

    def close(self) -> None:
        for node in (self.client, self.server, *self.source, *self.target):
            node.close()


@pytest.fixture(params=["local", "zmq", "cuda"])
def transfer(request: pytest.FixtureRequest, process: FaultyProcess) -> Iterator[Transfer]:
    transfer = Transfer(request.param)
    yield transfer
    transfer.close()


@pytest.fixture
def remote(process: FaultyProcess) -> Iterator[Transfer]:
    """A transfer whose pages travel as raw frames. No lease is renewed, after a quarter of it, before a delayed claim
    comes: a node refuses to renew what was not claimed."""
    transfer = Transfer("zmq", lease_s=8 * HOLD_S)
    yield transfer
    transfer.close()


@pytest.mark.parametrize(
    ("where", "refuser"),
    [
        ("in:link_welcome", "client"),
        ("in:offer", "client"),
        ("in:pages", "client"),
        ("out:claim", "server"),
        ("out:pull", "server"),
        ("out:ack", "server"),
    ],
)
def test_messages_of_a_data_link_are_damaged(
    process: FaultyProcess, remote: Transfer, where: str, refuser: str
) -> None:
    way, _, tag = where.partition(":")
    process.plan(frames={"flip": 1.0}, weights={"in": 0.0, "out": 0.0, way: 1.0}, tags=(tag,), most=1, seed=1)
    remote.claim()
    node = getattr(remote, refuser)
    spin([remote.server, remote.client], lambda _: node.dropped.count + remote.client.num_checksum_failures)
    assert process.noted() == [("flip", where, 0)]


@pytest.mark.parametrize("kind", ["duplicate", "delay", "reorder"])
def test_late_or_doubled_messages_harm_no_transfer(process: FaultyProcess, remote: Transfer, kind: str) -> None:
    process.plan(frames={kind: 1.0}, tags=("offer", "pages", "pull", "claim"), seed=2)
    remote.claim()
    remote.spin(Arrived, TicketEnded)
    assert same_pages(remote.target, [9, 4], remote.source, [5, 6])
    places = {where for _, where, _ in process.noted()}
    assert places == {"in:offer", "in:pages", "out:pull", "out:claim"}


def test_raw_frames_of_pages_are_damaged_too(process: FaultyProcess, remote: Transfer) -> None:
    """The injector draws one of the message's two frames. The test tries seeds until the raw frame is damaged."""
    for seed in range(40):
        process.plan(frames={"flip": 1.0}, weights={"out": 0.0}, tags=("pages",), most=1, seed=seed)
        remote.server.open(unit(f"s{seed}"), 1)
        remote.server.offer(unit(f"s{seed}"), [0], [5], [1])
        remote.server.finish(unit(f"s{seed}"), make_row(SCHEMA))
        remote.client.claim(unit(f"s{seed}"), peer_of(remote.server), 0, [20 + seed % 20])
        node = remote.client
        spin([remote.server, node], lambda _: node.dropped.count + node.num_checksum_failures)  # noqa: B023
        node.drop(unit(f"s{seed}"), "the test has seen it")
        if node.num_checksum_failures:
            return
        node.dropped.count = 0
    raise AssertionError("no raw frame was damaged")


def test_a_flipped_page_is_pulled_again(process: FaultyProcess, transfer: Transfer) -> None:
    process.plan(pages={"flip": 1.0}, most=1)
    transfer.claim()
    transfer.spin(Arrived, TicketEnded)
    assert transfer.client.num_checksum_failures == 1
    assert same_pages(transfer.target, [9, 4], transfer.source, [5, 6])
    assert process.noted() == [("page flip", "pull", 0)]


def test_a_stale_page_ends_the_transfer(process: FaultyProcess, transfer: Transfer) -> None:
    process.plan(pages={"stale": 1.0}, most=1)
    transfer.claim()
    (failed,) = named(transfer.spin(TransferFailed, TicketEnded), TransferFailed)
    assert "was reused" in failed.reason and process.noted() == [("page stale", "pull", 0)]


def test_a_slow_page_takes_its_time(
    process: FaultyProcess, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    real_sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), real_sleep(seconds)))
    process.plan(pages={"slow": 1.0}, most=2)
    transfer.claim()
    transfer.spin(Arrived)
    assert len([seconds for seconds in slept if seconds != 0.0005]) == 2
    assert process.noted() == [("page slow", "pull", 0)] * 2


@pytest.fixture
def tiered(process: FaultyProcess, tmp_path: Path) -> Iterator[TieredNode]:
    """A node whose pool has room for one of the texts, and its host memory for two."""
    node = TieredNode(10, 16, directory=tmp_path / "files")
    yield node
    process.plan()
    node.cache.close()


TIERED_TEXTS = [[number * 40 + index for index in range(8 * TIERED_PAGE)] for number in range(5)]


def run_tiered(node: TieredNode, texts: Sequence[list[int]] = TIERED_TEXTS) -> None:
    """Compute texts as requests do, those in files after these are read. `run` checks the bytes of each page found."""
    for text in texts:
        fetch = node.cache.fetch(text, "", len(text) // TIERED_PAGE - 1)
        wait_until(lambda fetch=fetch: node.cache.tend() or not node.cache.is_awaited(fetch), "files are read")
        node.run(text)
        wait_until(lambda: node.cache.tend() or node.disk.thread.is_idle, "files are written")
    node.cache.tend()
    node.check_books()


@pytest.mark.parametrize("kind", ["flip", "gone"])
def test_a_file_is_damaged_or_removed_before_it_is_read(kind: str, process: FaultyProcess, tiered: TieredNode) -> None:
    run_tiered(tiered)
    process.plan(files={kind: 0.3}, seed=2)
    run_tiered(tiered)
    noted = process.noted()
    assert {each[0] for each in noted} == {f"file {kind}"}
    assert 0 < len(noted) == tiered.disk.thread.num_damaged and tiered.disk.num_read > 0


def test_the_disk_becomes_full_in_the_middle_of_a_file(process: FaultyProcess, tiered: TieredNode) -> None:
    process.plan(files={"full": 0.1}, seed=3)
    run_tiered(tiered)
    assert 0 < len(process.noted()) == tiered.disk.thread.num_failures
    assert tiered.disk.num_written > 0 and not list(tiered.files.path.glob("*.new"))


def test_a_node_evicts_all_that_nobody_uses(process: FaultyProcess, tiered: TieredNode) -> None:
    run_tiered(tiered, TIERED_TEXTS[:1])
    lease = tiered.cache.acquire(TIERED_TEXTS[0], "", 3)
    process.plan(evicts=1.0, most=1)
    tiered.cache.tend()
    tiered.cache.tend()
    assert process.noted() == [("evict", "cache", 0)] and tiered.cache.num_pages == len(lease.pages) == 3
    tiered.cache.release(lease)
    run_tiered(tiered, TIERED_TEXTS[:1])


def test_a_node_reads_and_borrows_as_if_computing_took_as_long_as_planned(
    process: FaultyProcess, tiered: TieredNode
) -> None:
    tiered.tier.compute_token_s = lambda: 1e-9
    tiered.tier.copies.take_loads = lambda: [TimedLoad(1, 1.0)]
    assert not tiered.tier.is_sooner(1, 4)
    process.plan(token_s=1.0)
    assert tiered.tier.is_sooner(1, 4)


def test_a_clock_that_jumps_reaches_modules_that_were_loaded_before(process: FaultyProcess) -> None:
    """Functions hold the clock as a default argument, because processes are forked with all modules imported."""
    transfer = Transfer("local", lease_s=1000.0)
    assert transfer.server.poll() == []
    process.plan(clock_s=5000.0)
    assert transfer.server.poll() == []  # after a pause of the process itself, an expired lease is renewed once
    process.plan(clock_s=9000.0)
    assert [event.how for event in named(transfer.server.poll(), TicketEnded)] == ["lease"]
    transfer.close()


def test_the_clock_never_goes_back(process: FaultyProcess) -> None:
    process.plan(clock_s=100.0)
    ahead = time.monotonic()
    process.plan()
    assert process.faults.plan == Plan() and time.monotonic() >= ahead
    assert process.noted() == [("clock", "100 s ahead", 0)]


def test_a_plan_is_taken_once_though_several_threads_read_it(process: FaultyProcess) -> None:
    """Each plan is in force as soon as it is set, and stays so: no thread takes it again, or an older one."""
    faults, is_over = process.faults, threading.Event()

    def read_the_clock() -> None:
        while not is_over.is_set():
            faults.monotonic()

    threads = [threading.Thread(target=read_the_clock) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for seed in range(1, 41):
            process.plan(frames={"drop": 1.0}, most=1, seed=seed)
            assert faults.choose(faults.plan.frames, "in") == "drop"
            until = time.perf_counter() + 0.025  # longer than a file stays unread
            while time.perf_counter() < until:
                assert faults.plan.seed == seed and faults.choose(faults.plan.frames, "in") is None
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def struck() -> Iterator[list[int]]:
    """The signals that this process has sent to itself."""
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    yield caught
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "event",
    ["in:claim", "in:ack", "out:offer", "out:link_hello", "in:link_welcome", "in:offer", "out:ack", "pull"],
)
def test_a_strike_meets_its_event_at_either_end_of_a_data_link(
    process: FaultyProcess, struck: list[int], event: str
) -> None:
    """`in:claim` and `out:offer` happen at the ROUTER socket of the prefill node."""
    process.plan(strike=Strike(1, event, signal.SIGUSR1))
    transfer = Transfer("zmq")
    transfer.claim()
    transfer.spin(Arrived, TicketEnded)
    transfer.close()
    assert struck == [signal.SIGUSR1]
    assert process.noted() == [("SIGUSR1", event, 0)]


@pytest.mark.parametrize("event", ["in:cancelled", "out:cancelled", "in:hello_again", "out:hello_again"])
async def test_a_strike_meets_its_event_at_either_end_of_the_bus(
    process: FaultyProcess, nodes_bus: Bus, struck: list[int], event: str
) -> None:
    process.plan(strike=Strike(1, event, signal.SIGUSR1, skip=3))
    way: Way = "out" if event.endswith("cancelled") else "in"
    await nodes_bus.send(way, SENT[way][:3])
    assert struck == []
    await nodes_bus.send(way, SENT[way][:3])
    assert struck == [signal.SIGUSR1]


def test_a_plan_file_makes_a_whole_process_faulty(tmp_path: Path) -> None:
    """The injector is switched on as tests/support/clusters/forked.py does it."""
    (tmp_path / "a.plan").write_text('{"frames": {"drop": 1.0}}')
    code = """
import sys, time, zmq
from faulty import switch_on
switch_on(sys.argv[1])
from baton.metadata.bus.sockets import send_frames, receive_frames, connect_socket
context = zmq.Context()
router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
router.linger = dealer.linger = 0
dealer.routing_id = b"d"
connect_socket(dealer, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
dealer.send(b"past the wire")
assert router.poll(5000)
assert receive_frames(router, 2) == [b"d", b"past the wire"]
for _ in range(20):
    send_frames(router, b"d", b"hello")
time.sleep(0.2)
try:
    print("came", receive_frames(dealer, 2))
except zmq.Again:
    print("nothing came")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.plan")],
        check=True,
        timeout=200,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert done.stdout.strip() == "nothing came"
    assert len((tmp_path / "a.faults").read_text().splitlines()) == 20
