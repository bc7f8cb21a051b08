"""Hub and Link over real sockets on loopback, in a uvloop loop as in the router."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, get_args

import pytest
import uvloop
import zmq
from patience import until

from baton.metadata.bus.curve import KeyPair
from baton.metadata.bus.hub import Hub
from baton.metadata.bus.link import Link
from baton.metadata.bus.sockets import DRAIN_LIMIT, QUEUE_LEN, new_epoch, routing_id
from baton.metadata.errors import ConfigError, ProtocolError
from baton.metadata.wire.frames import encode, seal
from baton.metadata.wire.membership import Hello, HelloAgain, RouterHeartbeat
from baton.metadata.wire.messages import Cancel, Cancelled, ToNode, ToRouter

PEER = b"node:1"
DONE = Cancelled(rid="r", attempt=0)


class Router:
    """A hub that records its messages, and may answer them."""

    def __init__(self, address: str = "tcp://127.0.0.1:*", epoch: str = "e0", keys: KeyPair | None = None) -> None:
        self.messages: list[tuple[bytes, ToRouter]] = []
        self.lost: list[bytes] = []
        self.answer: Callable[[bytes, ToRouter], None] | None = None
        self.hub = Hub(address, epoch, keys, self._take, self.lost.append)
        self.hub.start()

    def _take(self, peer: bytes, message: ToRouter) -> None:
        self.messages.append((peer, message))
        if self.answer is not None:
            self.answer(peer, message)


async def collect(link: Link, count: int, kind: type) -> list[ToNode]:
    messages: list[ToNode] = []
    await until(lambda: messages.extend(m for m in link.receive() if isinstance(m, kind)) or len(messages) >= count)
    return messages


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router()
    yield router
    router.hub.close()


@pytest.fixture
async def link(router: Router) -> AsyncIterator[Link]:
    link = Link(router.hub.address, "node", "1", None)
    yield link
    link.close()


@pytest.fixture
async def raw(router: Router) -> AsyncIterator[zmq.Socket[bytes]]:
    """A peer that may send any bytes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.routing_id = b"raw:1"
    peer.connect(router.hub.address)
    yield peer
    peer.close()
    context.term()


async def test_every_message_goes_both_ways(router: Router, link: Link, sample: Any) -> None:
    up = [sample(kind, seed) for kind in get_args(ToRouter) for seed in range(5) if kind is not Hello]
    up.append(sample(Hello, node_id="node", epoch="1"))
    for message in up:
        assert link.send(message)
    await until(lambda: len(router.messages) == len(up))
    assert router.messages == [(PEER, message) for message in up]
    down = [sample(kind, seed) for kind in get_args(ToNode) for seed in range(5)]
    for message in down:
        assert router.hub.send(PEER, message)
    got: list[ToNode] = []
    await until(lambda: got.extend(link.receive()) or len([m for m in got if m in down]) == len(down))
    assert [m for m in got if m in down] == down
    assert link.dropped_frames == router.hub.dropped_frames == 0


async def test_the_port_is_resolved(router: Router) -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    assert int(router.hub.address.removeprefix("tcp://127.0.0.1:")) > 0
    with pytest.raises(ConfigError, match=r"cannot listen on .*give another --node-address"):
        Hub(router.hub.address, "e", None, router._take, router.lost.append)


@pytest.mark.parametrize("address", ["tcp://[::1]:0", "tcp://localhost:0", "ipc"])
async def test_the_hub_works_on_ipv6_names_and_ipc(address: str, tmp_path: Any) -> None:
    if address == "tcp://[::1]:0":
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    router = Router(f"ipc://{tmp_path}/hub" if address == "ipc" else address)
    link = Link(router.hub.address, "node", "1", None)
    link.send(DONE)
    await until(lambda: router.messages)
    link.close()
    router.hub.close()


async def test_keys_are_required_off_loopback(router: Router) -> None:
    with pytest.raises(ConfigError, match=r"tcp://0\.0\.0\.0:5700 is not on loopback.*--keys"):
        Hub("tcp://0.0.0.0:5700", "e", None, router._take, router.lost.append)
    with pytest.raises(ConfigError, match="not on loopback"):
        Link("tcp://10.0.0.1:5700", "node", "1", None)
    with pytest.raises(ConfigError, match="too long"):
        Link(router.hub.address, "n" * 255, "1", None)


def _bad_frames(sample: Any) -> Iterator[tuple[str, list[bytes]]]:
    yield "junk", [b"\xc1\xff\x00junk"]
    yield "empty", [b""]
    yield "no frame but an empty one and more", [b"", encode(DONE)]
    yield "too many frames", [encode(DONE)] * 2
    yield "very many frames", [b"x"] * 1000
    yield "wrong direction", [encode(HelloAgain(router_epoch="e0"))]
    yield "truncated", [encode(DONE)[:-1]]
    yield "trailing bytes", [encode(DONE) + b"\0"]
    yield "deep arrays", [b"\x91" * 200_000]
    yield "deep unknown field", [b"\x82\xa4type\xa9cancelled\xa3new" + b"\x91" * 200_000 + b"\xc0"]
    yield "deep field before the tag", [b"\x82\xa3new" + b"\x91" * 200_000 + b"\xc0\xa4type\xa9cancelled"]
    yield "bad utf-8", [b"\x83\xa4type\xa9cancelled\xa3rid\xa2\xff\xfe\xa7attempt\x00"]
    yield "a header bomb", [b"\xdd\xff\xff\xff\xff"]
    yield "another node's Hello", [encode(sample(Hello, node_id="node", epoch="1"))]
    yield "a Hello longer than any routing id", [encode(sample(Hello, node_id="漢" * 128, epoch="1"))]


async def test_bad_frames_are_counted_and_dropped(
    router: Router, raw: zmq.Socket[bytes], sample: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bad = list(_bad_frames(sample))
    bad += [(f"sealed {name}", [seal(frame) for frame in frames]) for name, frames in bad]  # past the checksum
    for count, (name, frames) in enumerate(bad, 1):
        raw.send_multipart(frames)
        await until(lambda: router.hub.dropped_frames >= count)  # noqa: B023
        assert router.hub.dropped_frames == count, name
    assert router.messages == []
    assert len([r for r in caplog.records if "dropped a frame" in r.message]) <= 2  # at most one a second
    raw.send(encode(DONE))
    await until(lambda: router.messages)
    assert router.messages == [(b"raw:1", DONE)]


async def test_raw_tcp_junk_disturbs_no_node(router: Router, link: Link) -> None:
    port = int(router.hub.address.rsplit(":", 1)[1])
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" * 50, bytes(range(256)) * 64, b"\xff" + b"\0" * 8):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(junk)
    link.send(DONE)
    await until(lambda: (PEER, DONE) in router.messages)
    assert all(peer == PEER for peer, _ in router.messages)


async def test_an_oversized_frame_costs_its_sender_the_connection(monkeypatch: pytest.MonkeyPatch, sample: Any) -> None:
    monkeypatch.setattr("baton.metadata.bus.hub.HUB_FRAME_BYTES", 1 << 16)
    router = Router()
    link = Link(router.hub.address, "node", "1", None)
    link.send(DONE)
    await until(lambda: router.messages)
    link.socket.send(bytes(1 << 17))
    await until(lambda: router.lost)
    assert router.lost == [PEER]
    link.send(DONE)  # it reconnects by itself
    await until(lambda: len(router.messages) == 2)
    link.close()
    router.hub.close()


async def test_a_node_drops_bad_frames_too(router: Router, link: Link) -> None:
    link.send(DONE)
    await until(lambda: router.messages)
    wrong: Any = DONE
    assert router.hub.send(PEER, wrong)
    router.hub._send_frame(PEER, seal(b"\x91" * 100_000))
    router.hub._send_frame(PEER, b"")
    good = Cancel(router_epoch="e0", rid="r", attempt=0, choices=None, reason="")
    router.hub.send(PEER, good)
    assert await collect(link, 1, Cancel) == [good]
    assert link.dropped_frames == 3


async def test_send_to_an_unknown_or_closed_peer_is_false(router: Router, link: Link) -> None:
    beat = RouterHeartbeat(router_epoch="e0")
    assert router.hub.send(b"nobody:1", beat) is False
    link.send(DONE)
    await until(lambda: router.messages)
    assert router.hub.send(PEER, beat) is True
    link.close()
    await until(lambda: router.lost)
    assert router.hub.send(PEER, beat) is False
    router.hub.close()
    assert router.hub.send(PEER, beat) is False
    router.hub.close()
    assert router.lost == [PEER]


async def test_send_to_a_full_queue_is_false_and_recovers(router: Router, link: Link) -> None:
    link.send(DONE)
    await until(lambda: router.messages)
    large = Cancel(router_epoch="e0", rid="r", attempt=0, choices=None, reason="x" * 4096)
    sent = 0
    while router.hub.send(PEER, large):
        sent += 1
        assert sent < 20 * QUEUE_LEN, "a node that reads nothing took everything"
    assert sent >= QUEUE_LEN
    assert len(await collect(link, sent, Cancel)) == sent
    await until(lambda: router.hub.send(PEER, large))
    assert router.lost == []


async def test_bursts_of_echoes_lose_no_wakeup(router: Router) -> None:
    def answer(peer: bytes, message: ToRouter) -> None:
        assert isinstance(message, Cancelled)
        router.hub.send(peer, Cancel(router_epoch="e0", rid=message.rid, attempt=0, choices=None, reason=""))

    router.answer = answer
    links = [Link(router.hub.address, f"n{i}", "1", None) for i in range(4)]
    bursts, got = [1, 2, DRAIN_LIMIT - 1, DRAIN_LIMIT, DRAIN_LIMIT + 1, 988, 1000], [0] * len(links)
    for burst in bursts:
        for i in range(burst):
            for link in links:
                assert link.send(Cancelled(rid=str(i), attempt=0))

        def all_back(expected: list[int] = [g + burst for g in got]) -> bool:  # noqa: B006
            for i, link in enumerate(links):
                got[i] += sum(isinstance(message, Cancel) for message in link.receive())
            return got == expected

        await until(all_back, 10.0)
    assert sum(got) == sum(bursts) * len(links) > 10_000
    for link in links:
        link.close()


async def test_sends_from_outside_the_drain_lose_no_wakeup(router: Router, link: Link) -> None:
    """A send can consume the edge of the file descriptor that announces a received message."""
    link.send(DONE)
    await until(lambda: router.messages)
    beat = RouterHeartbeat(router_epoch="e0")
    for count in range(2, 1500):
        link.send(DONE)
        for _ in range(3):
            router.hub.send(PEER, beat)
        link.receive()
        await until(lambda: len(router.messages) == count)  # noqa: B023


async def test_a_failing_handler_harms_only_its_message(router: Router, link: Link) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def answer(peer: bytes, message: ToRouter) -> None:
        if len(router.messages) == 1:
            raise ValueError("a bug")

    router.answer = answer
    link.send(DONE)
    link.send(DONE)
    await until(lambda: len(router.messages) == 2)
    assert len(failures) == 1
    assert "a bug" in failures[0]["message"]


async def test_a_message_that_its_handler_refuses_is_a_dropped_frame(router: Router, link: Link) -> None:
    def answer(peer: bytes, message: ToRouter) -> None:
        raise ProtocolError("its columns do not fit together")

    router.answer = answer
    link.send(DONE)
    await until(lambda: router.hub.dropped_frames == 1)


async def test_failing_handlers_are_reported_once_a_second(router: Router, link: Link) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def answer(peer: bytes, message: ToRouter) -> None:
        raise ValueError("a bug")

    router.answer = answer
    for _ in range(50):
        link.send(DONE)
    await until(lambda: len(router.messages) == 50)
    assert 1 <= len(failures) <= 3


CHILD = """
import sys, time
from baton.metadata.bus.link import Link
from baton.metadata.wire.messages import Cancelled
link = Link(sys.argv[1], sys.argv[2], "1", None)
link.send(Cancelled(rid="r", attempt=0))
time.sleep(60)
"""


@pytest.mark.timing
async def test_a_killed_process_is_reported_within_100_ms(router: Router, link: Link) -> None:
    link.send(DONE)
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, router.hub.address, name], stdin=subprocess.DEVNULL)
        for name in ("first", "second")
    ]
    try:
        await until(lambda: len(router.messages) == 3)
        for child, peer in zip(children, (b"first:1", b"second:1"), strict=True):
            child.send_signal(signal.SIGKILL)
            begun = time.perf_counter()
            await until(lambda: peer in router.lost)  # noqa: B023
            assert time.perf_counter() - begun < 0.1
    finally:
        for child in children:
            child.kill()
            child.wait()
    await asyncio.sleep(0.1)
    assert router.lost == [b"first:1", b"second:1"]  # and no other node


async def test_a_node_restarts_with_a_new_epoch(router: Router) -> None:
    epochs = [new_epoch(), new_epoch()]
    assert epochs[0] != epochs[1]
    old = Link(router.hub.address, "node", epochs[0], None)
    old.send(DONE)
    await until(lambda: len(router.messages) == 1)
    new = Link(router.hub.address, "node", epochs[1], None)  # before the old connection is closed
    new.send(DONE)
    await until(lambda: len(router.messages) == 2)
    assert [peer for peer, _ in router.messages] == [routing_id("node", epoch) for epoch in epochs]
    old.close()
    await until(lambda: router.lost)
    assert router.lost == [routing_id("node", epochs[0])]
    assert router.hub.send(routing_id("node", epochs[1]), RouterHeartbeat(router_epoch="e0"))
    new.close()


async def test_a_second_connection_under_the_same_id_takes_over(router: Router, link: Link) -> None:
    """A node may reconnect before the router knows that the old connection is dead."""
    link.send(DONE)
    await until(lambda: len(router.messages) == 1)
    again = Link(router.hub.address, "node", "1", None)
    again.send(DONE)
    await until(lambda: len(router.messages) == 2)
    router.hub.send(PEER, Cancel(router_epoch="e0", rid="r", attempt=0, choices=None, reason=""))
    assert len(await collect(again, 1, Cancel)) == 1
    again.close()


async def test_the_hub_sends_heartbeats(router: Router, link: Link) -> None:
    link.send(DONE)
    await until(lambda: router.messages)
    assert (await collect(link, 1, RouterHeartbeat))[0].router_epoch == "e0"


@pytest.mark.parametrize("client", ["right", "wrong", "none"])
async def test_only_clients_with_the_right_curve_keys_are_served(client: str) -> None:
    keys = KeyPair.generate()
    router = Router(keys=keys)
    given = {"right": keys, "wrong": KeyPair.generate(), "none": None}[client]
    link = Link(router.hub.address, "node", "1", given)
    link.send(DONE)
    if client == "right":
        await until(lambda: router.messages)
        assert router.hub.send(PEER, HelloAgain(router_epoch="e0"))
        assert len(await collect(link, 1, HelloAgain)) == 1
    else:
        await asyncio.sleep(0.5)
        assert router.messages == []
        assert router.hub.send(PEER, HelloAgain(router_epoch="e0")) is False
        assert link.receive() == []
    link.close()
    router.hub.close()


async def test_curve_client_with_the_servers_public_key_only_gets_nothing() -> None:
    """Encryption alone is not enough: a client must also hold the secret key of the cluster."""
    keys, own = KeyPair.generate(), KeyPair.generate()
    router = Router(keys=keys)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.curve_serverkey, peer.curve_publickey, peer.curve_secretkey = keys.public, own.public, own.secret
    peer.connect(router.hub.address)
    peer.send(encode(DONE))
    await asyncio.sleep(0.3)
    assert router.messages == []
    peer.close()
    context.term()
    router.hub.close()
