"""Origins and hosts as browsers send them and as people type them into --allow-origin and --allow-host."""

from __future__ import annotations

import pytest

from baton.metadata.errors import ConfigError
from baton.router.config import RouterConfig
from baton.router.origins import (
    Authority,
    Origin,
    allowed_hosts,
    allowed_origins,
    is_loopback,
    is_trusted,
    trusted_networks,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://chat.example", ("https", "chat.example", None)),
        ("HTTPS://Chat.Example:443", ("https", "chat.example", None)),
        ("http://chat.example:80", ("http", "chat.example", None)),
        ("http://chat.example:443", ("http", "chat.example", 443)),
        ("http://localhost:3000", ("http", "localhost", 3000)),
        ("http://localhost.:3000", ("http", "localhost", 3000)),
        ("http://[::1]:8000", ("http", "::1", 8000)),
        ("http://[0:0:0:0:0:0:0:1]", ("http", "::1", None)),
        ("chrome-extension://abcdefgh", ("chrome-extension", "abcdefgh", None)),
        ("tauri://localhost", ("tauri", "localhost", None)),
        ("file://", ("file", "", None)),
        ("null", None),
        ("", None),
        ("https://", None),
        ("https://:443", None),
        ("https://chat.example/", None),
        ("https://chat.example:99999", None),
        ("https://user@chat.example", None),
        ("https://one.example https://two.example", None),
        ("http://[::1", None),
        ("http://[::zz]", None),
        ("chat.example", None),
    ],
)
def test_origins_are_parsed(text: str, expected: tuple[str, str, int | None] | None) -> None:
    assert Origin.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost", ("localhost", None)),
        ("LOCALHOST:8000", ("localhost", 8000)),
        ("127.0.0.1:", ("127.0.0.1", None)),
        ("[::1]:8000", ("::1", 8000)),
        ("", None),
        (":8000", None),
        ("::1", None),
        ("evil.example@localhost", None),
        ("localhost/evil", None),
        ("localhost:80:80", None),
        ("localhost, evil.example", None),
    ],
)
def test_hosts_are_parsed(text: str, expected: tuple[str, int | None] | None) -> None:
    assert Authority.parse(text) == expected


def test_loopback_hosts_are_recognized_by_name() -> None:
    loopback = ["localhost", "chat.localhost", "127.0.0.1", "127.8.9.10", "::1"]
    others = [
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example",
        "0.0.0.0",
        "10.0.0.1",
        "notlocalhost",
        "",
    ]
    assert [host for host in (*loopback, *others) if is_loopback(host)] == loopback


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("https://chat.example/", "write https://chat.example"),
        ("https://chat.example:8443/app?x=1", "write https://chat.example:8443"),
        ("chat.example", "write https://chat.example"),
        ("localhost:3000", "write http://localhost:3000"),
        ("127.0.0.1:3000", "write http://127.0.0.1:3000"),
        ("https://one.example,https://two.example", "once for each"),
        ("https://one.example https://two.example", "once for each"),
        ("https://*.example", "* alone for all"),
        ("null", "sandboxed"),
        ("https://", "must be like https://chat.example"),
        ("https://chat.example:port", "must be like https://chat.example"),
        ("https:/chat.example", "must be like https://chat.example"),
        ("", "must be like https://chat.example"),
    ],
)
def test_a_mistyped_origin_is_refused_with_the_fix(value: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        RouterConfig(allow_origin=("https://good.example", value))
    assert str(error.value).startswith(f"--allow-origin {value}: ")
    assert fix in str(error.value)


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("http://baton.example", "write baton.example"),
        ("http://baton.example:8000/v1", "write baton.example"),
        ("baton.example:8000", "write baton.example"),
        ("[fd00::5]:8000", "write fd00::5"),
        ("*.example", "* alone for all"),
        (".example", "* alone for all"),
        ("one.example,two.example", "once for each"),
        ("", "must be a name"),
        ("http://", "must be a name"),
    ],
)
def test_a_mistyped_host_is_refused_with_the_fix(value: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        RouterConfig(allow_host=("good.example", value))
    assert str(error.value).startswith(f"--allow-host {value}: ")
    assert fix in str(error.value)


def test_allowed_origins_and_hosts_are_normalized() -> None:
    assert allowed_origins(()) == frozenset()
    assert allowed_origins(["https://a.example:443", "HTTPS://A.example"]) == {Origin("https", "a.example", None)}
    assert allowed_origins(["https://a.example", "*"]) is None
    assert allowed_hosts(["Baton.Example", "[fd00::5]", "fd00::5", "10.0.0.1"]) == {
        "baton.example",
        "fd00::5",
        "10.0.0.1",
    }
    assert allowed_hosts(["*"]) is None


@pytest.mark.parametrize(
    ("value", "peer", "expected"),
    [
        ("10.0.0.0/8", "10.255.0.1", True),
        ("10.0.0.7", "10.0.0.8", False),
        ("10.0.0.7/8", "10.9.9.9", True),
        ("::1", "::1", True),
        ("fe80::/10", "fe80::1%eth0", True),
        ("10.0.0.0/8", "::ffff:10.0.0.1", True),
        ("::ffff:0:0/96", "::ffff:10.0.0.1", True),
        ("10.0.0.0/8", None, False),
        ("10.0.0.0/8", "", False),
        ("10.0.0.0/8", "a-socket", False),
    ],
)
def test_a_proxy_is_trusted_by_its_address(value: str, peer: str | None, expected: bool) -> None:
    assert is_trusted(peer, trusted_networks((value,))) == expected
    assert not is_trusted(peer, ())


@pytest.mark.parametrize("value", ["proxy.example", "10.0.0.0/33", "10.0.0.0/8,11.0.0.0/8", "*", ""])
def test_a_range_that_is_none_is_named_with_the_fix(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--trusted-proxy .*like 10\.0\.0\.7 or 10\.0\.0\.0/8"):
        trusted_networks((value,))
