"""Heartbeats are sent while the main thread is busy, and the router judges nodes by a clock that the test turns."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator

import pytest
from patience import wait_until

from baton.metadata.bus.hub import Hub
from baton.metadata.bus.link import Link
from baton.metadata.bus.liveness import (
    HEARTBEAT_INTERVAL_S,
    MAX_SILENCE_S,
    PEER_SILENCE_S,
    RARE_INTERVAL_S,
    Change,
    HeartbeatThread,
    PeerLiveness,
)
from baton.metadata.wire.membership import IDLE, Heartbeat
from baton.metadata.wire.messages import Cancelled, ToRouter
from baton.metadata.wire.node_info import Load, NodeStats
from baton.metadata.wire.protocol import PROTOCOL_MAX

LOAD = Load(free_pages=7, running=1, waiting=0)


class HeartbeatRouter(threading.Thread):
    """A hub in a thread with a loop of its own, because the test keeps the main thread busy."""

    def __init__(self, address: str = "tcp://127.0.0.1:0") -> None:
        super().__init__(daemon=True)
        self._address = address
        self.heartbeats: list[tuple[float, bytes, ToRouter]] = []
        self.lost: list[bytes] = []
        self.is_ready = threading.Event()
        self.start()
        assert self.is_ready.wait(5)

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        self.hub = Hub(self._address, "e", None, self._take, self.lost.append)
        self.hub.start()
        self.is_ready.set()
        await self._is_over.wait()
        self.hub.close()

    def _take(self, peer: bytes, message: ToRouter) -> None:
        self.heartbeats.append((time.monotonic(), peer, message))

    def close(self) -> None:
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._is_over.set)
            self.join()

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.heartbeats) >= count, f"{count} messages have come")


@pytest.fixture
def router() -> Iterator[HeartbeatRouter]:
    router = HeartbeatRouter()
    yield router
    router.close()


@pytest.fixture
def thread(router: HeartbeatRouter) -> Iterator[HeartbeatThread]:
    thread = HeartbeatThread(router.hub.address, "node", "1", None, load=LOAD)
    yield thread
    thread.close()


@pytest.mark.timing
def test_heartbeats_go_on_while_the_main_thread_is_busy(router: HeartbeatRouter, thread: HeartbeatThread) -> None:
    thread.start()
    thread.enter("step", 0.5)
    router.wait_for(1)
    start, count = time.monotonic(), 0
    while time.monotonic() - start < 2.0:  # pure Python, never waiting
        count += 1
    during = [(at, heartbeat) for at, _, heartbeat in router.heartbeats if start <= at <= start + 2.0]
    assert len(during) >= 7  # of 10
    assert max(b - a for (a, _), (b, _) in itertools.pairwise(during)) < PEER_SILENCE_S / 2
    last = during[-1][1]
    assert isinstance(last, Heartbeat)
    assert (last.step, last.phase, last.phase_limit_s) == (1, "step", 0.5)
    assert 1.4 < last.phase_age_s < 2.2


def test_heartbeats_carry_the_id_and_the_figures_of_their_node(
    router: HeartbeatRouter, thread: HeartbeatThread
) -> None:
    thread.start()
    router.wait_for(1)
    peer, first = router.heartbeats[0][1:]
    assert isinstance(first, Heartbeat)
    assert (peer, first.step, first.phase, first.load) == (b"node:1", 0, "starting", LOAD)
    thread.enter("prefill", 1.0)
    thread.enter("idle", 2.0)
    thread.report(Load(free_pages=3, running=2, waiting=1), NodeStats(steps=9))
    router.wait_for(len(router.heartbeats) + 2)
    heartbeat = router.heartbeats[-1][2]
    assert isinstance(heartbeat, Heartbeat)
    assert (heartbeat.step, heartbeat.phase, heartbeat.load.free_pages, heartbeat.stats.steps) == (2, "idle", 3, 9)


def test_heartbeats_carry_the_silence_of_ranks_even_if_the_node_hangs(router: HeartbeatRouter) -> None:
    since = time.monotonic()
    thread = HeartbeatThread(
        router.hub.address,
        "node",
        "1",
        None,
        load=LOAD,
        interval_s=0.02,
        rank_silences_s=lambda: (0.0, time.monotonic() - since),
    )
    thread.speak(PROTOCOL_MAX, 1)
    thread.start()
    try:
        router.wait_for(3)
        *_, last = [message for _, _, message in router.heartbeats]
        assert isinstance(last, Heartbeat) and len(last.rank_silences_s) == 2
        assert last.rank_silences_s[0] == 0.0 < 0.03 < last.rank_silences_s[1] < 60.0
    finally:
        thread.close()


def test_a_lost_heartbeat_socket_is_no_lost_node(router: HeartbeatRouter, thread: HeartbeatThread) -> None:
    link = Link(router.hub.address, "node", "1", None)
    link.send(Cancelled(rid="r", attempt=0))
    thread.start()
    router.wait_for(2)
    thread.close()
    thread.close()
    time.sleep(0.2)
    assert router.lost == []
    link.close()
    wait_until(lambda: router.lost, "the node is lost")
    assert router.lost == [b"node:1"]


def test_only_heartbeats_are_taken_from_a_heartbeat_socket(router: HeartbeatRouter) -> None:
    link = Link(router.hub.address, "node:1", "beat", None)
    link.send(Cancelled(rid="r", attempt=0))
    wait_until(lambda: router.hub.dropped_frames, "the frame is dropped")
    assert router.hub.dropped_frames == 1
    assert router.heartbeats == []
    link.close()


def test_a_thread_without_router_keeps_no_old_heartbeats(router: HeartbeatRouter) -> None:
    address = router.hub.address
    router.close()
    thread = HeartbeatThread(address, "node", "1", None, load=LOAD, interval_s=0.01)
    thread.start()
    time.sleep(0.1)
    thread.enter("step", 1.0)
    time.sleep(0.1)
    later = HeartbeatRouter(address)
    later.wait_for(3)
    thread.close()
    later.close()
    phases = {heartbeat.phase for _, _, heartbeat in later.heartbeats if isinstance(heartbeat, Heartbeat)}
    assert phases == {"step"}


@pytest.mark.timing
def test_an_idle_node_without_news_sends_few_heartbeats_and_tells_news_at_once(router: HeartbeatRouter) -> None:
    thread = HeartbeatThread(router.hub.address, "node", "1", None, load=LOAD, interval_s=0.02)
    thread.speak(PROTOCOL_MAX, 1)
    thread.enter(IDLE, 10.0)
    thread.start()
    try:
        router.wait_for(1)
        begun, num_before = time.monotonic(), len(router.heartbeats)
        while time.monotonic() - begun < 2.2 * RARE_INTERVAL_S:
            thread.enter(IDLE, 10.0)  # its loop goes round, and has nothing to do
            thread.report(LOAD, NodeStats())
            time.sleep(0.01)
        assert 2 <= len(router.heartbeats) - num_before <= 4
        said = router.heartbeats[-1][2]
        assert isinstance(said, Heartbeat) and said.interval_s == RARE_INTERVAL_S
        for news in (NodeStats(steps=1), NodeStats(steps=2)):
            num_before, begun = len(router.heartbeats), time.monotonic()
            thread.report(LOAD, news)
            router.wait_for(num_before + 1)
            assert time.monotonic() - begun < RARE_INTERVAL_S / 2
        thread.enter("step", 1.0)
        num_before = len(router.heartbeats)
        router.wait_for(num_before + 5)
        assert router.heartbeats[-1][0] - router.heartbeats[-5][0] < RARE_INTERVAL_S / 2
        said = router.heartbeats[-1][2]
        assert isinstance(said, Heartbeat) and said.interval_s == 0.02
    finally:
        thread.close()


@pytest.mark.timing
def test_enter_is_cheap(router: HeartbeatRouter, thread: HeartbeatThread) -> None:
    begun = time.perf_counter()
    for _ in range(10_000):
        thread.enter("step", 1.0)
    assert (time.perf_counter() - begun) / 10_000 < 50e-6


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def heartbeat(
    age_s: float = 0.0, limit_s: float = 1.0, round_trip_s: float = 0.0, interval_s: float = 0.0
) -> Heartbeat:
    return Heartbeat(5, "step", age_s, limit_s, LOAD, NodeStats(), round_trip_s=round_trip_s, interval_s=interval_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(clock: Clock) -> PeerLiveness[str]:
    peers = PeerLiveness[str](clock)
    peers.add("n")
    peers.hear("n", heartbeat())
    return peers


def pass_time(clock: Clock, peers: PeerLiveness[str], seconds: float) -> list[Change[str]]:
    changes: list[Change[str]] = []
    for _ in range(round(seconds / 0.1)):
        clock.now += 0.1
        changes += peers.check()
    return changes


def test_silence_is_death_once(clock: Clock, peers: PeerLiveness[str]) -> None:
    assert pass_time(clock, peers, 1.4) == []
    assert peers.hear("n", heartbeat()) is None
    assert pass_time(clock, peers, 1.4) == []
    assert peers.state("n") == "alive"
    (change,) = pass_time(clock, peers, 3.0)
    assert (change.peer, change.state) == ("n", "dead")
    assert change.reason in ("silent for 1.5 s", "silent for 1.6 s")
    assert peers.state("n") == "dead"


def test_a_node_has_time_for_its_first_heartbeat(clock: Clock, peers: PeerLiveness[str]) -> None:
    """It has another connection than the Hello, whose handshake may end seconds later."""
    peers.add("new")
    changes = pass_time(clock, peers, MAX_SILENCE_S - 0.1)
    assert [change.peer for change in changes] == ["n"]
    assert [change.peer for change in pass_time(clock, peers, 0.3)] == ["new"]


@pytest.mark.parametrize(("round_trip_s", "limit_s"), [(0.04, PEER_SILENCE_S), (2.0, 8.0)])
def test_a_node_behind_a_slow_network_may_be_silent_for_longer(
    clock: Clock, peers: PeerLiveness[str], round_trip_s: float, limit_s: float
) -> None:
    for _ in range(20):
        peers.hear("n", heartbeat(round_trip_s=round_trip_s))
        assert not peers.check()
        clock.now += 0.2
    silent_s = 0.2
    while not peers.check():
        clock.now, silent_s = clock.now + 0.1, silent_s + 0.1
    assert limit_s <= silent_s <= limit_s + 0.2


def test_a_beat_brings_the_dead_back(clock: Clock, peers: PeerLiveness[str]) -> None:
    pass_time(clock, peers, 3.0)
    change = peers.hear("n", heartbeat())
    assert change is not None
    assert change.state == "alive"


@pytest.mark.parametrize("age_s", [1.01, float("nan"), float("inf")])
def test_a_phase_over_its_limit_is_stuck(peers: PeerLiveness[str], age_s: float) -> None:
    assert peers.hear("n", heartbeat(1.0, 1.0)) is None
    change = peers.hear("n", heartbeat(age_s, 1.0))
    assert change is not None
    assert change.state == "stuck"
    assert "in 'step' for" in change.reason
    assert "limit of 1 s" in change.reason
    assert peers.hear("n", heartbeat(age_s + 1, 1.0)) is None
    recovered = peers.hear("n", heartbeat(0.0))
    assert recovered is not None
    assert recovered.state == "alive"


def test_a_node_that_starts_is_not_stuck(peers: PeerLiveness[str]) -> None:
    starting = Heartbeat(0, "starting", 117.0, 60.0, LOAD, NodeStats())
    assert peers.hear("n", starting) is None and peers.state("n") == "alive"


def test_time_before_the_heartbeat_belongs_to_no_phase(router: HeartbeatRouter, thread: HeartbeatThread) -> None:
    """A node loads and compiles after its heartbeat was made and before it starts."""
    thread._phase = thread._phase._replace(since=time.monotonic() - 117.0)
    thread.start()
    router.wait_for(1)
    heartbeat = router.heartbeats[0][2]
    assert isinstance(heartbeat, Heartbeat) and heartbeat.phase_age_s < 60.0


@pytest.mark.parametrize(("gap_s", "least_s", "most_s"), [(0.2, 1.4, 1.7), (0.7, 2.4, 3.0), (3.0, 5.5, 6.3)])
def test_a_node_whose_heartbeats_come_late_may_be_silent_for_longer(
    gap_s: float, least_s: float, most_s: float, clock: Clock, peers: PeerLiveness[str]
) -> None:
    """On a starved machine the gaps grow. On a healthy one, silence is found as fast as ever."""
    gap = 0.2
    for _ in range(60):
        gap = min(gap + 0.05, gap_s)
        assert pass_time(clock, peers, gap) == []
        peers.hear("n", heartbeat())
    silent_s = 0.0
    while peers.state("n") == "alive":
        pass_time(clock, peers, 0.1)
        silent_s += 0.1
    assert least_s <= silent_s <= most_s


@pytest.mark.parametrize("check_s", [0.25, 0.4, 0.9])
def test_a_starved_router_still_finds_the_dead(check_s: float, clock: Clock, peers: PeerLiveness[str]) -> None:
    changes: list[Change[str]] = []
    begun = clock.now
    while not changes:
        clock.now += check_s
        changes = peers.check()
    assert 1.5 < clock.now - begun <= 1.5 * max(1.0, check_s / 0.3) + check_s + 0.01


def test_a_node_may_be_silent_until_its_next_heartbeat_is_due(clock: Clock, peers: PeerLiveness[str]) -> None:
    for _ in range(20):
        clock.now += RARE_INTERVAL_S
        peers.hear("n", heartbeat(interval_s=RARE_INTERVAL_S))
    late_s = RARE_INTERVAL_S - HEARTBEAT_INTERVAL_S
    assert pass_time(clock, peers, PEER_SILENCE_S + late_s - 0.1) == []
    assert [change.state for change in pass_time(clock, peers, 0.3)] == ["dead"]


def test_no_node_can_ask_for_endless_patience(clock: Clock, peers: PeerLiveness[str]) -> None:
    peers.hear("n", heartbeat(interval_s=1e9))
    assert [change.state for change in pass_time(clock, peers, PEER_SILENCE_S + RARE_INTERVAL_S)] == ["dead"]


def test_a_stuck_node_that_falls_silent_is_dead(clock: Clock, peers: PeerLiveness[str]) -> None:
    peers.hear("n", heartbeat(2.0, 1.0))
    (change,) = pass_time(clock, peers, 2.0)
    assert change.state == "dead"


def test_a_router_that_was_held_up_declares_no_node_dead(clock: Clock, peers: PeerLiveness[str]) -> None:
    pass_time(clock, peers, 1.0)
    clock.now += 10.0
    assert peers.check() == []
    assert [change.state for change in pass_time(clock, peers, 2.0)] == ["dead"]


def test_peers_not_watched_are_ignored(clock: Clock, peers: PeerLiveness[str]) -> None:
    assert peers.hear("stranger", heartbeat()) is None
    assert peers.state("stranger") is None
    peers.hear("n", heartbeat())
    peers.remove("n")
    peers.remove("n")
    assert pass_time(clock, peers, 3.0) == []
    assert peers.state("n") is None


def test_the_next_router_gets_heartbeats_of_the_oldest_protocol_until_it_welcomes_the_node() -> None:
    """An older router does not know the newer fields of a load."""
    load = Load(free_pages=1, running=0, waiting=0, prompt_token_s=0.5)
    first = HeartbeatRouter()
    thread = HeartbeatThread(first.hub.address, "node", "1", None, load=load, interval_s=0.02)

    def told(router: HeartbeatRouter) -> float:
        router.wait_for(len(router.heartbeats) + 3)
        heartbeat = router.heartbeats[-1][2]
        assert isinstance(heartbeat, Heartbeat)
        return heartbeat.load.prompt_token_s

    thread.start()
    try:
        assert told(first) == 0.0, "no router has welcomed the node"
        thread.speak(PROTOCOL_MAX, 1)
        assert told(first) == 0.5
        first.close()
        second = HeartbeatRouter(first.hub.address)
        thread.speak(PROTOCOL_MAX, 1)  # the node has not noticed yet
        second.wait_for(3)
        assert {heartbeat.load.prompt_token_s for _, _, heartbeat in second.heartbeats} == {0.0}  # type: ignore[union-attr]
        thread.speak(PROTOCOL_MAX, 2)
        assert told(second) == 0.5
        second.close()
    finally:
        thread.close()
