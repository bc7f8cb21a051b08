"""Addresses, the rule about keys, and the identity of a host."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.metadata.bus import addresses
from baton.metadata.bus.addresses import address_of_rank, any_port_of, host_identity, parse_address, require_keys
from baton.metadata.bus.curve import KeyPair
from baton.metadata.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port", "printed"),
    [
        ("tcp://127.0.0.1:5700", "127.0.0.1", 5700, "tcp://127.0.0.1:5700"),
        ("tcp://127.0.0.1:0", "127.0.0.1", None, "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:*", "127.0.0.1", None, "tcp://127.0.0.1:*"),
        ("tcp://*:5700", "*", 5700, "tcp://*:5700"),
        ("tcp://[::1]:65535", "::1", 65535, "tcp://[::1]:65535"),
        ("tcp://router-0.baton_x.svc:1", "router-0.baton_x.svc", 1, "tcp://router-0.baton_x.svc:1"),
    ],
)
def test_tcp_addresses_are_parsed_and_printed(text: str, host: str, port: int | None, printed: str) -> None:
    address = parse_address(text)
    assert (address.scheme, address.host, address.port, str(address)) == ("tcp", host, port, printed)


def test_ipc_addresses_are_parsed_and_printed() -> None:
    address = parse_address("ipc:///run/baton/hub")
    assert (address.scheme, address.path, str(address)) == ("ipc", "/run/baton/hub", "ipc:///run/baton/hub")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:5700",
        "tcp://127.0.0.1",
        "tcp://:5700",
        "tcp://host:port",
        "tcp://host:-1",
        "tcp://host:65536",
        "tcp://::1:5700",
        "tcp://[fe80]:5700",
        "tcp://[1:2:3]:5700",
        "tcp://host:5700/",
        "tcp://a b:5700",
        "tcp://host:5700\n",
        "udp://127.0.0.1:5700",
        "ipc://",
        "ipc://" + "x" * 101,
        "ipc:///a\0b",
    ],
)
def test_malformed_addresses_are_named(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_address(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://localhost:1", "tcp://LocalHost:1", "ipc:///x"],
)
def test_loopback_needs_no_keys(text: str) -> None:
    assert parse_address(text).is_loopback
    require_keys(text, None)


@pytest.mark.parametrize(
    "text",
    [
        "tcp://0.0.0.0:1",
        "tcp://*:1",
        "tcp://[::]:1",
        "tcp://10.0.0.1:1",
        "tcp://128.0.0.1:1",
        "tcp://127.0.0.1.example.org:1",
        "tcp://localhost.example.org:1",
        "tcp://router:1",
    ],
)
def test_everything_else_needs_keys(text: str) -> None:
    with pytest.raises(ConfigError, match="--keys") as error:
        require_keys(text, None)
    assert text in str(error.value)
    require_keys(text, KeyPair.generate())


def test_only_ipv6_addresses_need_ipv6() -> None:
    assert parse_address("tcp://[::1]:1").needs_ipv6
    assert not parse_address("tcp://127.0.0.1:1").needs_ipv6
    assert not parse_address("tcp://*:1").needs_ipv6
    assert not parse_address("tcp://no-such-host.invalid:1").needs_ipv6
    assert not parse_address("ipc:///x").needs_ipv6


def test_processes_of_one_host_agree() -> None:
    program = "from baton.metadata.bus.addresses import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert other == host_identity()
    assert len(other) == 32


def test_another_user_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = host_identity()
    monkeypatch.setattr(addresses.os, "geteuid", lambda: 12345)
    assert host_identity() != mine


def test_without_a_kernel_identity_no_two_hosts_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> object:
        raise FileNotFoundError

    monkeypatch.setattr(addresses.Path, "readlink", fail)
    assert host_identity() != host_identity()


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("tcp://[::1]:5800", "tcp://[::1]:5802"),
        ("tcp://host-1:*", "tcp://host-1:*"),
        ("ipc:///run/baton/pages", "ipc:///run/baton/pages-2"),
        ("[::1]", "[::1]"),
    ],
)
def test_ranks_bind_behind_rank_0(host: str, bound: str) -> None:
    assert address_of_rank(host, 0) == host
    assert address_of_rank(host, 2) == bound


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "tcp://10.0.0.1:*"),
        ("10.0.0.1:7000", "tcp://10.0.0.1:7000"),
        ("host-1:*", "tcp://host-1:*"),
        ("::1", "tcp://[::1]:*"),
        ("[::1]", "tcp://[::1]:*"),
        ("[fd00::7]:7000", "tcp://[fd00::7]:7000"),
        ("tcp://[::1]:7000", "tcp://[::1]:7000"),
        ("ipc:///run/pages", "ipc:///run/pages"),
    ],
)
def test_a_host_may_have_brackets_and_a_port(host: str, address: str) -> None:
    assert any_port_of(host) == address
    parse_address(address)
    if not address.endswith("*") and address.startswith("tcp"):
        assert parse_address(address_of_rank(host, 1)).port == 7001


def test_ranks_without_ports_behind_rank_0_are_refused() -> None:
    assert address_of_rank("tcp://10.0.0.1:65533", 2) == "tcp://10.0.0.1:65535"
    with pytest.raises(ConfigError, match=r"65534': rank 2 would listen at port 65536; use a port of at most 65533$"):
        address_of_rank("tcp://10.0.0.1:65534", 2)


def test_an_address_for_clients_is_told_from_one_for_nodes() -> None:
    with pytest.raises(ConfigError, match=r"nodes connect to the router's node_address, like tcp://HOST:5700"):
        parse_address("http://127.0.0.1:8000")
