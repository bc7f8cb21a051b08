"""`baton doctor --router` tries the key that a node here would have, and no node joins by that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton.deploy.doctor import reach as tried
from baton.deploy.doctor.reach import Reached, reach, reach_all
from baton.deploy.up import free_port
from baton.metadata.bus.allow_list import ROUTER, add_line, line_of
from baton.metadata.bus.curve import KeyPair
from baton.metadata.bus.hub import Hub

Start = Callable[[KeyPair | None], str]


@pytest.fixture(autouse=True)
def is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer for a handshake than a person waits."""
    monkeypatch.setattr(tried, "_CONNECT_S", 15.0)


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts a router's port for nodes, and returns its address. No node may say Hello there."""
    with ExitStack() as end:

        def begin(keys: KeyPair | None) -> str:
            hub = Hub("tcp://127.0.0.1:*", "e", keys, lambda *what: pytest.fail(f"{what}"), lambda _: None)
            end.callback(hub.close)
            return hub.address

        yield begin


def test_one_key_file_for_all(start: Start, tmp_path: Path) -> None:
    cluster, other = tmp_path / "cluster.key", tmp_path / "other.key"
    address = start(KeyPair.create(cluster))
    KeyPair.create(other)
    assert reach(address, str(cluster), None).key == "taken"
    assert reach(address, str(other), None).key == "refused"
    assert reach(address, None, None).key == "refused"
    assert reach(address, str(tmp_path / "absent.key"), None).key == "untried"


def test_keys_of_an_allow_list(start: Start, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    router = KeyPair.create(tmp_path / "router.key")
    for name in ("d0", "d1"):
        KeyPair.create(tmp_path / f"{name}.key")
        add_line(here, line_of(name, KeyPair.load(tmp_path / f"{name}.key").public))
    for path in (here, there):
        add_line(path, line_of(ROUTER, router.public))
    add_line(there, line_of("d0", KeyPair.load(tmp_path / "d0.key").public))
    address = start(KeyPair.load(tmp_path / "router.key", there))
    assert reach(address, str(tmp_path / "d0.key"), str(here)).key == "taken"
    assert reach(address, str(tmp_path / "d1.key"), str(here)).key == "refused"


def test_a_router_without_keys_takes_nodes_without(start: Start) -> None:
    found = reach(start(None), None, None)
    assert (found.failure, found.key) == ("", "taken")


def test_a_port_where_nobody_listens() -> None:
    port = free_port()
    assert reach(f"tcp://127.0.0.1:{port}", None, None) == Reached(f"tcp://127.0.0.1:{port}", "Connection refused")


def test_every_router_of_a_list_is_tried_with_the_key_that_it_has(start: Start, tmp_path: Path) -> None:
    listed = tmp_path / "list"
    for name in ("router-a", "router-b", "d0"):
        KeyPair.create(tmp_path / f"{name}.key")
        add_line(listed, line_of(name, KeyPair.load(tmp_path / f"{name}.key").public))
    addresses = [start(KeyPair.load(tmp_path / f"router-{name}.key", listed)) for name in "ba"]
    found = reach_all(",".join([*addresses, "tcp://no-such-host.invalid:5700"]), str(tmp_path / "d0.key"), str(listed))
    assert [each.key for each in found] == ["taken", "taken", "untried"]
    assert found[2].failure.startswith("the name cannot be resolved")
