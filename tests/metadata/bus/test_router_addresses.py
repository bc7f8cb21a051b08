"""The addresses of a node's routers: a list, and what its names resolve to."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from baton.metadata.bus import router_addresses
from baton.metadata.bus.router_addresses import RouterAddresses, router_entries
from baton.metadata.errors import ConfigError

ANSWERS: dict[str, list[str]] = {}


@pytest.fixture(autouse=True)
def name_server(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name server: addresses by name."""

    def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host not in ANSWERS:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in ANSWERS[host]]
        return [(family, 1, 6, "", (each, port)) for family, each in zip(families, ANSWERS[host], strict=True)]

    ANSWERS.clear()
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return ANSWERS


def test_a_list_is_divided_at_commas() -> None:
    assert router_entries(" tcp://a:1, ipc:///b,tcp://a:1,") == ("tcp://a:1", "ipc:///b")
    with pytest.raises(ConfigError, match="give an address"):
        router_entries(" ,")
    with pytest.raises(ConfigError, match="write tcp://b:2"):
        router_entries("tcp://a:1,b:2")


def test_addresses_need_no_name_server_and_no_thread() -> None:
    found = RouterAddresses("tcp://10.0.0.1:1,tcp://[fd00::1]:2,tcp://localhost:3,ipc:///x")
    found.start()
    assert found.current == ("tcp://10.0.0.1:1", "tcp://[fd00::1]:2", "tcp://localhost:3", "ipc:///x")
    assert found._thread is None


def test_a_name_gives_all_its_addresses_also_new_ones(caplog: pytest.LogCaptureFixture) -> None:
    found = RouterAddresses("tcp://routers:5700,tcp://10.0.0.9:1")
    assert found.current == ("tcp://10.0.0.9:1",)
    found.look()
    found.look()
    assert len(caplog.records) == 1 and "routers cannot be resolved: Name or service" in caplog.text
    ANSWERS["routers"] = ["10.0.0.2", "fd00::2", "10.0.0.1", "10.0.0.2"]
    found.look()
    assert found.current == ("tcp://10.0.0.1:5700", "tcp://10.0.0.2:5700", "tcp://10.0.0.9:1")
    ANSWERS["routers"] = ["fd00::2"]
    found.look()
    assert found.current == ("tcp://[fd00::2]:5700", "tcp://10.0.0.9:1")
    del ANSWERS["routers"]
    found.look()
    assert found.current == ("tcp://[fd00::2]:5700", "tcp://10.0.0.9:1"), "the last answer stays"


def test_names_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_addresses, "RESOLVE_S", 0.01)
    found = RouterAddresses("tcp://routers:5700")
    ANSWERS["routers"] = ["10.0.0.1"]
    found.start()
    try:
        for host in ("10.0.0.1", "10.0.0.2"):
            ANSWERS["routers"] = [host]
            while found.current != (f"tcp://{host}:5700",):
                pass
    finally:
        found.close()
