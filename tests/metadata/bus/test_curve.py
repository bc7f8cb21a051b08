"""Key files, and the keys with which a connection is accepted."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from key_files import Listed
from patience import wait_until

from baton.metadata.bus import curve
from baton.metadata.bus.connections import PortWatch
from baton.metadata.bus.curve import KeyPair, secure_client, secure_server
from baton.metadata.bus.sockets import bound_address, sender_key
from baton.metadata.config import ProcessConfig
from baton.metadata.errors import ConfigError
from baton.metadata.logs import Throttle

Context = zmq.Context[zmq.Socket[bytes]]


class Net:
    """A context and the sockets that the test opened in it."""

    def __init__(self) -> None:
        self.context: Context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def open(self, kind: int) -> zmq.Socket[bytes]:
        self.sockets.append(self.context.socket(kind))
        self.sockets[-1].linger = 0
        return self.sockets[-1]

    def server(self, keys: KeyPair) -> zmq.Socket[bytes]:
        socket = self.open(zmq.ROUTER)
        secure_server(socket, keys)
        socket.bind("tcp://127.0.0.1:*")
        return socket

    def knock(self, server: zmq.Socket[bytes], keys: KeyPair | None, server_key: bytes | None = None) -> None:
        socket = self.open(zmq.DEALER)
        if keys is not None:
            secure_client(socket, keys, server_key or keys.server_key("router"))
        socket.connect(bound_address(server))
        socket.send(b"hello")

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
        self.context.term()  # would hang if the handler's thread did not leave


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    net.close()


def test_a_created_key_file_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    keys = KeyPair.create(path)
    assert KeyPair.load(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys != KeyPair.generate()
    assert keys.secret.decode() not in repr(keys)


def test_create_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    KeyPair.create(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        KeyPair.create(path)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot be written"):
        KeyPair.create(tmp_path / "no" / "such" / "folder")


def test_load_names_the_fault_of_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    with pytest.raises(ConfigError, match=r"cannot be read.*baton keys"):
        KeyPair.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyPair.load(tmp_path)
    one, two = KeyPair.generate(), KeyPair.generate()
    for text, problem in (
        (b"", "no file of `baton keys`"),
        (b"ann sk-1 research\n", "no file of `baton keys`"),
        (b"\xff\xfe", "malformed"),
        (b"public = ", "malformed"),
        (b'public = 5\nsecret = "x"', "public is not a key"),
        (b'public = "' + one.public + b'"\nsecret = "short"', "secret is not a key"),
        (b'public = "' + one.public + b'"\nsecret = "' + b"~" * 40 + b'"', "secret is not a key"),
        ('public = "{}"'.format("é" * 40).encode(), "public is not a key"),
        (b'public = "' + one.public + b'"\nsecret = "' + two.secret + b'"', "not the public key of secret"),
    ):
        path.write_bytes(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=problem):
            KeyPair.load(path)


@pytest.mark.parametrize(("mode", "user", "is_right"), [(0o640, 0, False), (0o604, 0, False), (0o640, 7, True)])
def test_a_file_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, user: int, is_right: bool
) -> None:
    """Files of root that a group may read are accepted, because Kubernetes gives secrets to a user in this way."""
    path = tmp_path / "cluster.key"
    keys = KeyPair.create(path)
    path.chmod(mode)
    owner = 0 if is_right else os.geteuid()
    monkeypatch.setattr("os.fstat", lambda _: os.stat_result((0o100000 | mode, 1, 1, 1, owner, 0, 1, 0, 0, 0)))
    monkeypatch.setattr("os.geteuid", lambda: user)
    if is_right:
        assert KeyPair.load(path) == keys
    else:
        with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 600 {path}"):
            KeyPair.load(path)


def test_a_key_and_its_list_are_read_together(tmp_path: Path) -> None:
    listed = Listed(tmp_path / "list", "router", "p0")
    listed.pairs["p0"].write(tmp_path / "p0.key")
    keys = KeyPair.load(tmp_path / "p0.key", listed.path)
    assert (keys.name, keys.server_key("router")) == ("p0", listed.pairs["router"].public)
    assert KeyPair.load(tmp_path / "p0.key").name is None
    stranger = KeyPair.create(tmp_path / "stranger.key")
    with pytest.raises(ConfigError, match=re.escape(f"add its line, `NAME {stranger.public.decode()}`")):
        KeyPair.load(tmp_path / "stranger.key", listed.path)
    with pytest.raises(ConfigError, match="--allow-list x needs a key of this process: give --keys FILE"):
        KeyPair.configured(ProcessConfig(allow_list="x"))


def test_only_listed_keys_get_in_and_later_ones_without_a_restart(
    net: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.metadata.bus.curve._refusals", Throttle(0.0))
    listed = Listed(tmp_path / "list", "router", "p0", "d0")
    listed.write("router", "p0")
    keys = listed.of("router")
    server = net.server(keys)
    net.knock(server, listed.of("p0"), listed.pairs["router"].public)
    assert server.poll(5000)
    assert sender_key(server.recv_multipart(copy=False)[0]) == listed.pairs["p0"].public
    late = net.open(zmq.DEALER)
    late.handshake_ivl = 100
    late.reconnect_ivl = 10
    secure_client(late, listed.pairs["d0"], listed.pairs["router"].public)
    with caplog.at_level(logging.WARNING):
        late.connect(bound_address(server))
        late.send(b"hello")
        assert server.poll(300) == 0
    assert f"its public key {listed.pairs['d0'].public.decode()} is not in allow-list {listed.path}" in caplog.text
    listed.write("router", "p0", "d0")
    assert server.poll(5000)  # it comes back by itself, and the list is looked at
    assert sender_key(server.recv_multipart(copy=False)[0]) == listed.pairs["d0"].public


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_a_refusal_closes_the_connection_however_late_it_comes(
    net: Net, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq leaves connections open whose refusal comes after it looked for it. The client may try again."""
    answer = curve._answer
    monkeypatch.setattr(curve, "_answer", lambda request: time.sleep(delay_s) or answer(request))
    keys = KeyPair.generate()
    server = net.server(keys)
    events: list[int] = []
    watch = PortWatch(server, None, zmq.EVENT_DISCONNECTED, lambda event, _: events.append(event))
    with closing(watch):
        net.knock(server, KeyPair.generate(), keys.public)
        wait_until(lambda: len(events) > 1, timeout_s=5)


def test_only_the_clusters_key_gets_in(net: Net) -> None:
    keys = KeyPair.generate()
    server = net.server(keys)
    net.knock(server, None)
    net.knock(server, KeyPair.generate())
    net.knock(server, KeyPair(keys.public, KeyPair.generate().secret))
    net.knock(server, KeyPair.generate(), keys.public)  # speaks CURVE with the right server, yet is a stranger
    assert server.poll(300) == 0
    net.knock(server, keys)
    assert server.poll(5000)
    assert server.recv_multipart()[1:] == [b"hello"]
    assert server.poll(100) == 0


def test_one_context_may_have_several_servers_each_with_its_key(net: Net) -> None:
    keys = [KeyPair.generate(), KeyPair.generate()]
    servers = [net.server(pair) for pair in keys]
    for i in (0, 1):
        net.knock(servers[i], keys[1 - i], keys[i].public)
    assert [server.poll(200) for server in servers] == [0, 0]
    for i in (0, 1):
        net.knock(servers[i], keys[i])
        assert servers[i].poll(5000)


def test_without_a_handler_no_connection_is_accepted(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.metadata.bus.curve._start_handler", lambda _: None)
    keys = KeyPair.generate()
    server = net.server(keys)
    net.knock(server, keys)
    assert server.poll(300) == 0


def test_a_context_with_a_handler_can_be_destroyed() -> None:
    context: Context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    secure_server(socket, KeyPair.generate())
    context.destroy(linger=0)
    assert context.closed
    assert socket.closed
