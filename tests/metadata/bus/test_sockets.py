"""Common parts of all sockets: routing ids, bounded receiving, and the count of dropped frames."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from baton.metadata.bus.sockets import (
    DroppedFrames,
    bound_address,
    configure_socket,
    has_input,
    new_epoch,
    receive_frames,
    routing_id,
    send_frames,
)
from baton.metadata.errors import ConfigError, ProtocolError, StaleMessage

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (left, right):
        configure_socket(socket, "tcp://127.0.0.1:*", max_frame=1000)
    left.bind("tcp://127.0.0.1:*")
    right.connect(bound_address(left))
    assert left.poll(5000, zmq.POLLOUT)  # connected
    yield left, right
    context.destroy(linger=0)


# A connection whose routing id another one has taken over still sends, and then closes.
REPLACED = """
import time, zmq
from baton.metadata.bus import hub, sockets
from baton.metadata.bus.link import connect_dealer

listening = zmq.Context().socket(zmq.ROUTER)
hub._bind(listening, "tcp://127.0.0.1:*", None)
ends = []
for _ in range(2):
    address = sockets.bound_address(listening)
    ends.append(connect_dealer(zmq.Context(), address, b"node:1", None, None, max_frame=1000))
    ends[-1].send(b"hello")
    assert listening.poll(5000) and listening.recv_multipart()
ends[0].send(b"more")
assert not listening.poll(300)
ends[0].close(linger=0)
time.sleep(2.5 * sockets.ZMTP_HEARTBEAT_MS / 1000)
ends[1].send(b"here")
assert listening.recv_multipart() == [b"node:1", b"here"]
"""


def test_a_connection_that_was_replaced_does_not_abort_the_process_when_it_closes() -> None:
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_epochs_differ_and_name_routing_ids() -> None:
    assert len({new_epoch() for _ in range(100)}) == 100
    assert routing_id("node", "e0") == b"node:e0"


def test_a_routing_id_leaves_room_for_the_heartbeat_suffix() -> None:
    assert len(routing_id("n" * 247, "e0")) == 250
    with pytest.raises(ConfigError, match="too long"):
        routing_id("n" * 248, "e0")


def test_a_long_message_is_cut_to_one_frame_more_than_allowed(pair: Pair) -> None:
    left, right = pair
    send_frames(left, b"1", b"2", b"3", b"4", b"5")
    assert right.poll(5000)
    assert receive_frames(right, 2) == [b"1", b"2", b"3"]
    with pytest.raises(zmq.Again):
        receive_frames(right, 2)


def test_input_is_seen_before_it_is_read(pair: Pair) -> None:
    left, right = pair
    assert not has_input(right)
    send_frames(left, b"1")
    assert right.poll(5000) and has_input(right)


def test_late_messages_have_their_own_count(caplog: pytest.LogCaptureFixture) -> None:
    dropped = DroppedFrames(logging.getLogger("baton.test"), "link")
    with caplog.at_level("INFO"):
        for _ in range(3):
            dropped.add(b"peer", ProtocolError("nonsense"))
            dropped.add(b"peer", StaleMessage("it has ended"))
    assert (dropped.count, dropped.num_stale) == (3, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "link dropped a frame of b'peer' (1 so far): nonsense"
    ]
