"""Callers: which routes each key opens, how many sequences it may run, which caches it shares, and the address of a
client behind proxies."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from baton.metadata.errors import ConfigError, Overloaded, RequestError
from baton.metadata.wire import messages as m
from baton.router.config import RouterConfig
from baton.router.http.server.access import (
    MAX_SESSION_ID,
    SESSION_HEADERS,
    Access,
    CacheSalts,
    Caller,
    KeyLevel,
    client_address,
    session_id,
)
from baton.router.origins import trusted_networks
from baton.router.tenants.fair_share import Tenant

from ...conftest import System
from ...dispatching.test_runner import own, wait_until

ADMIN_ROUTES = [("GET", "/debug/nodes"), ("GET", "/debug/ledger"), ("GET", "/debug/handoff"), ("POST", "/admin/flush")]
CLIENT_ROUTES = [("GET", "/v1/models"), ("GET", "/live?once=true"), ("GET", "/openapi.json")]


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key is not None else {}


@pytest.mark.parametrize(
    ("host", "settings", "key", "of_clients", "of_figures", "of_operators"),
    [
        ("127.0.0.1", {}, None, 200, 200, 200),
        ("127.0.0.1", {}, "any", 200, 200, 200),
        ("127.0.0.1", {"api_key": "a"}, None, 401, 403, 401),
        ("127.0.0.1", {"api_key": "a"}, "wrong", 401, 403, 401),
        ("127.0.0.1", {"api_key": "a"}, "a", 200, 403, 200),
        ("127.0.0.1", {"admin_key": "b"}, None, 200, 401, 401),
        ("127.0.0.1", {"admin_key": "b"}, "wrong", 200, 401, 401),
        ("127.0.0.1", {"admin_key": "b"}, "b", 200, 200, 200),
        ("127.0.0.1", {"api_key": "a", "admin_key": "b"}, "a", 200, 403, 403),
        ("127.0.0.1", {"api_key": "a", "admin_key": "b"}, "b", 200, 200, 200),
        ("127.0.0.1", {"api_key": "a", "admin_key": "b"}, None, 401, 401, 401),
        ("0.0.0.0", {}, None, 200, 200, 403),
        ("0.0.0.0", {"api_key": "a"}, "a", 200, 403, 403),
        ("0.0.0.0", {"api_key": "a", "admin_key": "b"}, "b", 200, 200, 200),
    ],
)
def test_each_key_opens_the_routes_it_is_for(
    make_router: Callable[..., Any],
    host: str,
    settings: Any,
    key: str | None,
    of_clients: int,
    of_figures: int,
    of_operators: int,
) -> None:
    router = make_router(host=host, **settings)
    expectations = ((CLIENT_ROUTES, of_clients), ([("GET", "/metrics")], of_figures), (ADMIN_ROUTES, of_operators))
    for routes, expected in expectations:
        for method, path in routes:
            status, body, _ = router.request(method, path, headers=bearer(key))
            assert status == expected, (method, path, body)
            if status != 200:
                kind = {401: "authentication_error", 403: "permission_error"}[status]
                assert body["error"]["type"] == kind
    assert router.request("GET", "/health")[0] == 200


def test_keys_are_read_from_a_file(make_router: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst\n\n  second  \n")
    router = make_router(api_keys=str(keys), api_key="third")
    statuses = [router.request("GET", "/v1/models", headers=bearer(key))[0] for key in ("first", "second", "third")]
    assert statuses == [200, 200, 200]
    assert router.request("GET", "/v1/models", headers=bearer("# ours"))[0] == 401


def test_wrong_key_settings_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for settings, words in (
        ({"api_keys": str(tmp_path / "none")}, "cannot be read"),
        ({"api_keys": str(empty)}, "no key"),
        ({"max_concurrent_per_key": 2}, "no API key"),
        ({"api_key": "same", "admin_key": "same"}, "another"),
    ):
        with pytest.raises(ConfigError, match=words):
            Access(RouterConfig(**settings))  # type: ignore[arg-type]
    assert Access(RouterConfig(admin_key="secret")).has_admin_key


def test_the_running_sequences_of_a_key_are_bounded(make_system: Callable[..., System], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    settings = {"api_keys": str(keys), "max_concurrent_per_key": 2, "admin_key": "boss"}
    system = make_system(router=settings)
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    wait_until(lambda: system.router.request("GET", "/ready", headers=bearer("boss"))[0] == 200)
    system.behaviour.hold = threading.Event()

    def complete(key: str, **body: Any) -> tuple[int, Any, dict[str, str]]:
        given = {"model": "fake", "prompt": "hello", "max_tokens": 100, **body}
        return system.router.request("POST", "/v1/completions", given, headers=bearer(key))

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(complete, "one", n=2)]
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        status, body, headers = complete("one")
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        assert "2 sequences of this API key" in body["error"]["message"]
        status, body, _ = complete("one", prompt=["a", "b", "c"])
        assert (status, body["error"]["param"]) == (400, "n")
        running += [pool.submit(complete, key) for key in ("two", "boss")]
        wait_until(lambda: len(own(system.cluster.by_name("d0"), m.Reserve)) == 3)
        system.behaviour.hold.set()
        assert [future.result()[0] for future in running] == [200] * 3
    assert complete("one", n=2)[0] == 200, "what has ended still counts"


def test_requests_without_the_api_key_are_refused(make_system: Any) -> None:
    system: System = make_system(router={"api_key": "sesame"})
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    request = system.router.request
    assert request("GET", "/health")[0] == 200
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/debug/ledger"),
        ("POST", "/admin/flush"),
    ):
        status, body, headers = request(method, path)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer other", "Basic sesame", "sesame", "Bearer sesamé"):
        assert (
            request("GET", "/v1/models", headers={"Authorization": wrong.encode("latin-1").decode("latin-1")})[0] == 401
        )
    assert request("GET", "/v1/models", headers={"Authorization": "Bearer sesame"})[0] == 200


def test_keys_are_read_again_without_a_restart(make_system: Callable[..., System], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\nann new acme\n")
    system = make_system(router={"api_keys": str(keys), "admin_key": "boss"}).up()
    system.behaviour.hold = threading.Event()

    def status(key: str) -> int:
        return system.router.request("GET", "/v1/models", headers=bearer(key))[0]

    with ThreadPoolExecutor(1) as pool:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 100}
        running = pool.submit(system.router.request, "POST", "/v1/completions", body, bearer("old"))
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        assert status("later") == 401
        keys.write_text("ann new acme\neve later other\n")
        assert (status("later"), status("new"), status("old")) == (200, 200, 401)
        for mistake in ("a b c d e f\n", "boss\n", ""):
            keys.write_text(mistake)
            assert (status("later"), status("a"), status("old"), status("boss")) == (200, 401, 401, 200), mistake
        system.behaviour.hold.set()
        assert running.result()[0] == 200, "what runs is finished, though its key is gone"
    page = system.router.request("GET", "/metrics", headers=bearer("boss"))[1].decode()
    assert 'baton_tenant_requests_total{outcome="done",tenant="default"} 1.0' in page


def test_a_tenant_is_removed_with_its_last_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\nann two acme\neve three acme\nbob four other\n")
    access = Access(RouterConfig(api_keys=str(keys)))
    for lines, removed in (
        ("ann two acme\nbob four other\n", []),
        ("bob four other\n", ["acme"]),
        ("a mistake in this line is not a removal of all\n", []),
        ("bob four other\nann two acme\n", []),
        ("one\n", ["acme", "other"]),
    ):
        keys.write_text(lines)
        access.look(force=True)
        assert access.take_removed() == removed, lines
    assert access.take_removed() == []


def test_a_key_keeps_its_running_sequences_when_the_file_is_read_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a k1\n")
    access = Access(RouterConfig(api_keys=str(keys), max_concurrent_per_key=2))
    asked = make_mocked_request("GET", "/v1/models", bearer("k1"))
    caller = access.caller_of(asked, KeyLevel.KEY)
    with access.counted(caller, 2):
        keys.write_text("b k1 acme 3\n")
        again = access.caller_of(asked, KeyLevel.KEY)
        assert again is caller and again.words == "acme/b" and again.tenant == Tenant("acme", 3.0)
        with pytest.raises(Overloaded), access.counted(again, 1):
            pass


@pytest.mark.parametrize(
    ("peer", "headers", "key", "tenant"),
    [
        ("10.1.2.3", {"x-tenant": "acme"}, None, "acme"),
        ("::ffff:10.1.2.3", {"X-Tenant": " acme "}, None, "acme"),
        ("fd00::7", {"X-Tenant": "acme"}, None, "acme"),
        ("10.1.2.3", {}, None, "default"),
        ("10.1.2.3", {"X-Tenant": "default"}, None, "default"),
        ("11.1.2.3", {"X-Tenant": "acme"}, None, "default"),
        (None, {"X-Tenant": "acme"}, None, "default"),
        ("10.1.2.3", {"X-Tenant": "acme"}, "k1", "acme"),
        ("10.1.2.3", {"X-Tenant": "acme"}, "k2", "theirs"),
        ("10.1.2.3", {"X-Tenant": "acme"}, "boss", "default"),
        ("10.1.2.3", {"X-Tenant": ""}, None, None),
        ("10.1.2.3", {"X-Tenant": "n" * 129}, None, None),
        ("10.1.2.3", {"X-Tenant": "a\x7fb"}, None, None),
    ],
)
def test_only_a_trusted_proxy_names_a_tenant_and_only_where_the_key_names_none(
    tmp_path: Path, peer: str | None, headers: dict[str, str], key: str | None, tenant: str | None
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("bob k1\neve k2 theirs\n")
    settings: dict[str, Any] = {"trusted_proxy": ("10.0.0.0/8", "fd00::/8"), "tenant_header": "X-Tenant"}
    if key is not None:
        settings |= {"api_keys": str(keys), "admin_key": "boss"}
    access = Access(RouterConfig(**settings))
    transport: Any = SimpleNamespace(get_extra_info=lambda name: (peer, 1) if name == "peername" and peer else None)

    def caller() -> Caller:
        asked = make_mocked_request("POST", "/v1/completions", {**bearer(key), **headers}, transport=transport)
        return access.caller_of(asked, KeyLevel.KEY)

    if tenant is None:
        with pytest.raises(RequestError, match="X-Tenant"):
            caller()
        return
    found = caller()
    assert found.tenant.name == tenant
    assert caller() is found, "it may cancel its own requests"


def test_a_tenant_header_that_comes_twice_is_refused() -> None:
    access = Access(RouterConfig(trusted_proxy=("10.0.0.0/8",), tenant_header="X-Tenant"))
    transport: Any = SimpleNamespace(get_extra_info=lambda name: ("10.0.0.1", 1))
    headers = CIMultiDict([("X-Tenant", "mine"), ("X-Tenant", "theirs")])
    with pytest.raises(RequestError, match="one name"):
        access.caller_of(make_mocked_request("GET", "/", headers, transport=transport), KeyLevel.KEY)


def test_tenants_do_not_share_cached_prefixes_or_places(make_system: Callable[..., System], tmp_path: Path) -> None:
    """What nodes are sent, what the log shows, and the figures of each tenant."""
    keys = tmp_path / "keys"
    keys.write_text("k0\nann k1 acme\neve k2 acme\nbob k3 other\n")
    system = make_system(router={"api_keys": str(keys), "admin_key": "boss"}).up()

    def salt(key: str, **more: Any) -> str:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 5, **more}
        status, answer, _ = system.router.request("POST", "/v1/completions", body, bearer(key))
        assert status == 200
        (sent,) = (each for each in own(system.cluster.by_name("p0"), m.Prefill) if each.rid == answer["id"])
        return sent.request.cache_salt

    salts = {key: salt(key) for key in ("k0", "k1", "k2", "k3")}
    assert salts["k0"] == "" and salts["k1"] == salts["k2"]
    assert len({*salts.values(), salt("k0", cache_salt="acme"), salt("k0", cache_salt=salts["k1"])}) == 5
    page = system.router.request("GET", "/metrics", headers=bearer("boss"))[1].decode()
    assert 'baton_tenant_requests_total{outcome="done",tenant="acme"} 2.0' in page
    assert 'baton_tenant_output_tokens_total{tenant="other"} 5.0' in page


TRUSTED = trusted_networks(("10.0.0.0/8", "::1"))


@pytest.mark.parametrize(
    ("peer", "headers", "address"),
    [
        ("8.8.8.8", {"X-Forwarded-For": "1.1.1.1"}, "8.8.8.8"),
        ("10.0.0.1", {}, "10.0.0.1"),
        ("10.0.0.1", {"X-Forwarded-For": "1.1.1.1, 2.2.2.2, 10.0.0.2"}, "2.2.2.2"),
        ("10.0.0.1", {"X-Forwarded-For": "1.1.1.1, nonsense, 10.0.0.2"}, "10.0.0.2"),
        ("10.0.0.1", {"X-Forwarded-For": "2.2.2.2:443"}, "2.2.2.2"),
        ("::1", {"Forwarded": 'for=1.1.1.1;proto=http, by=x;For="[2001:db8::1]:80"'}, "2001:db8::1"),
        ("10.0.0.1", {"Forwarded": "for=unknown"}, "10.0.0.1"),
        ("10.0.0.1", {"X-Forwarded-For": ""}, "10.0.0.1"),
    ],
)
def test_the_last_untrusted_address_counts(peer: str, headers: dict[str, str], address: str) -> None:
    assert client_address(peer, headers, TRUSTED) == address
    assert client_address(peer, headers, ()) == peer


NOBODY = Caller()
BY_KEY = [Caller(digest=b"1"), Caller(digest=b"2")]  # two keys of the default tenant
ACME = [Caller(digest=digest, tenant=Tenant("acme")) for digest in (b"3", b"4")]
OTHER = Caller(digest=b"5", tenant=Tenant("other"))


def test_a_tenant_shares_its_cache_and_no_other_has_the_same_salt() -> None:
    salts = CacheSalts("tenant", None)
    assert {salts.salt(caller, None) for caller in (NOBODY, *BY_KEY)} == {""}, "nothing changes with one tenant"
    assert salts.salt(NOBODY, "") == ""
    callers = [NOBODY, ACME[0], OTHER]
    given = [None, "a", "acme", salts.salt(ACME[0], None), "\x00acme", "é"]
    assert len({salts.salt(caller, each) for caller in callers for each in given}) == len(callers) * len(given)
    assert all(salts.salt(ACME[0], each) == salts.salt(ACME[1], each) for each in given)
    assert len(salts.salt(OTHER, "a")) == 64
    for caller in callers:  # so nodes find all pages of a tenant that is gone, and of no other
        begin = salts.prefix(caller.tenant.name)
        owners = {
            each.tenant.name for each in callers for given_ in given if salts.salt(each, given_).startswith(begin)
        }
        assert owners == {caller.tenant.name}


def test_with_the_scope_key_each_key_has_a_cache_of_its_own() -> None:
    salts = CacheSalts("key", None)
    callers = [NOBODY, *BY_KEY, *ACME, OTHER]
    assert len({salts.salt(caller, given) for caller in callers for given in (None, "a")}) == 2 * len(callers)
    assert salts.salt(NOBODY, None) == ""


def test_routers_agree_if_they_have_the_same_secret() -> None:
    first, second, third, drawn = (CacheSalts("tenant", secret) for secret in ("s" * 100, "s" * 100, "t", None))
    assert first.salt(OTHER, "a") == second.salt(OTHER, "a")
    assert len({each.salt(OTHER, "a") for each in (first, third, drawn)}) == 3


def test_sessions_of_one_name_are_apart_by_owner() -> None:
    salts = CacheSalts("tenant", None)
    keys = [salts.session(caller, "s") for caller in (NOBODY, ACME[0], OTHER)]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert salts.session(ACME[1], "s") == keys[1] and salts.session(OTHER, "t") != keys[2]
    assert salts.session(OTHER, "\ud800"), "a header may hold any bytes"


@pytest.mark.parametrize(
    ("headers", "key", "expected"),
    [
        ({}, None, None),
        ({}, "", None),
        ({}, "k", "k"),
        *(({name.title(): " s "}, "k", "s") for name in SESSION_HEADERS),
        ({"X-SMG-Routing-Key": "later", "X-Session-ID": "first"}, None, "first"),
        ({"X-Session-ID": "  "}, "k", "k"),
        ({"X-Session-ID": "s" * (MAX_SESSION_ID + 1)}, "k", None),
        ({}, "k" * (MAX_SESSION_ID + 1), None),
    ],
)
def test_the_first_header_counts_then_the_body(headers: dict[str, str], key: str | None, expected: str | None) -> None:
    assert session_id(CIMultiDict(headers), key) == expected
