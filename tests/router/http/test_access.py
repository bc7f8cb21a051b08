"""API keys: which routes each key opens, and how many sequences it may run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.metadata.errors import ConfigError
from baton.metadata.wire import messages as m
from baton.router.config import RouterConfig
from baton.router.http.access import Access

from ..conftest import System
from ..test_runner import own, wait_until

ADMIN_ROUTES = [("GET", "/debug/nodes"), ("GET", "/debug/ledger"), ("GET", "/debug/handoff"), ("POST", "/admin/flush")]
CLIENT_ROUTES = [("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/openapi.json")]


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key is not None else {}


@pytest.mark.parametrize(
    ("host", "settings", "key", "of_clients", "of_operators"),
    [
        ("127.0.0.1", {}, None, 200, 200),
        ("127.0.0.1", {}, "any", 200, 200),
        ("127.0.0.1", {"api_key": "a"}, None, 401, 401),
        ("127.0.0.1", {"api_key": "a"}, "wrong", 401, 401),
        ("127.0.0.1", {"api_key": "a"}, "a", 200, 200),
        ("127.0.0.1", {"admin_key": "b"}, None, 200, 401),
        ("127.0.0.1", {"admin_key": "b"}, "wrong", 200, 401),
        ("127.0.0.1", {"admin_key": "b"}, "b", 200, 200),
        ("127.0.0.1", {"api_key": "a", "admin_key": "b"}, "a", 200, 403),
        ("127.0.0.1", {"api_key": "a", "admin_key": "b"}, "b", 200, 200),
        ("127.0.0.1", {"api_key": "a", "admin_key": "b"}, None, 401, 401),
        ("0.0.0.0", {}, None, 200, 403),
        ("0.0.0.0", {"api_key": "a"}, "a", 200, 403),
        ("0.0.0.0", {"api_key": "a", "admin_key": "b"}, "b", 200, 200),
    ],
)
def test_each_key_opens_the_routes_it_is_for(
    make_router: Callable[..., Any], host: str, settings: Any, key: str | None, of_clients: int, of_operators: int
) -> None:
    router = make_router(host=host, **settings)
    for routes, expected in ((CLIENT_ROUTES, of_clients), (ADMIN_ROUTES, of_operators)):
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
        ("GET", "/metrics"),
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
