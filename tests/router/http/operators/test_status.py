"""Routes for probes and monitoring."""

from __future__ import annotations

import urllib.error
import urllib.request
from importlib.metadata import version
from typing import Any

import pytest

from ...conftest import System
from ...dispatching.test_runner import wait_until


def test_metrics_count_requests_tokens_and_times(system: System) -> None:
    system.complete()
    system.complete(prompt="")
    system.router.request("POST", "/v1/completions", b"{")
    page = system.router.request("GET", "/metrics")[1].decode()
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    num_tokens = len(system.say(system.text))
    assert float(figures['baton_requests_total{model="fake",outcome="done"}']) == 1
    assert float(figures['baton_output_tokens_total{model="fake"}']) == num_tokens
    assert float(figures['baton_itl_seconds_count{model="fake"}']) == num_tokens - 1
    assert float(figures['baton_ttft_seconds_count{model="fake"}']) == 1
    assert float(figures['baton_queue_seconds_count{model="fake"}']) == 1
    assert float(figures['baton_e2e_seconds_count{model="fake"}']) == 1
    assert float(figures['baton_transfer_bytes_total{model="fake"}']) == 2 * 1024  # the canary's too
    assert float(figures['baton_http_responses_total{status="400"}']) == 2
    assert float(figures['baton_node_free_pages{model="fake",node="d0",role="decode"}']) == 512
    assert float(figures['baton_node_steps_total{model="fake",node="p0",role="prefill"}']) == 7


@pytest.mark.parametrize(("key", "is_told"), [("boss", True), ("client", False)])
def test_only_operators_see_why_the_router_is_not_ready(make_router: Any, key: str, is_told: bool) -> None:
    router = make_router(api_key="client", admin_key="boss")
    status, body, _ = router.request("GET", "/ready", headers={"Authorization": f"Bearer {key}"})
    assert status == 503
    assert ("no node has joined" in body["error"]["message"]) == is_told


def test_the_version_needs_a_key_like_other_routes(make_router: Any) -> None:
    router = make_router(api_key="client")
    assert router.request("GET", "/version")[0] == 401
    status, body, _ = router.request("GET", "/version", headers={"Authorization": "Bearer client"})
    assert (status, body) == (200, {"version": version("baton-serve")})


def test_probes_need_no_key_and_without_one_they_tell_only_counts(make_system: Any) -> None:
    system: System = make_system(router={"api_key": "client", "admin_key": "boss"})
    request = system.router.request
    assert request("GET", "/health")[:2] == (200, {"status": "ok"})
    status, body, _ = request("GET", "/ready")
    assert status == 503 and body["error"]["message"] == (
        "no request could be served now: 0 prefill and 0 decode nodes are here"
    )
    system.up()
    for key in (None, "wrong", "client"):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        assert request("GET", "/ready", headers=headers)[:2] == (200, {"status": "ready"})
        assert request("GET", "/health", headers=headers)[:2] == (200, {"status": "ok"})
    assert request("GET", "/metrics")[0] == 401
    status, body, _ = request("GET", "/metrics", headers={"Authorization": "Bearer client"})
    assert status == 403 and "--ops-address serves it without a key" in body["error"]["message"]
    page = request("GET", "/metrics", headers={"Authorization": "Bearer boss"})[1].decode()
    assert "baton_http_responses_total{" not in page, "answers to probes count"
    assert "\nbaton_ready 1.0\n" in page and "process_resident_memory_bytes" in page
    assert f'\nbaton_build_info{{version="{version("baton-serve")}"}} 1.0\n' in page


def test_a_foreign_page_reads_nothing_from_a_probe_but_its_status(make_system: Any) -> None:
    router = make_system().router
    status, body, _ = router.request("GET", "/ready")
    assert (status, "no node has joined" in body["error"]["message"]) == (503, True), "on loopback all are operators"
    for foreign in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        status, body, _ = router.request("GET", "/ready", headers=foreign)
        assert (status, "no node has joined" in body["error"]["message"]) == (503, False)
        assert router.request("GET", "/health", headers=foreign)[:2] == (200, {"status": "ok"})


def test_the_ops_address_serves_probes_and_metrics_without_a_key_and_nothing_else(make_system: Any) -> None:
    system: System = make_system(router={"api_key": "client", "ops_address": "0"}).up()
    url = system.router.router.ops_url
    assert url.startswith("http://127.0.0.1:")

    def get(path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        asked = urllib.request.Request(path if "//" in path else url + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(asked, timeout=5) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    assert get("/metrics")[0] == 200 and b"baton_ready 1.0" in get("/metrics")[1]
    assert get("/ready") == (200, b'{"status":"ready"}')
    assert get("/health") == (200, b'{"status":"ok"}')
    for path in ("/health", "/metrics", f"{system.router.url}/health", f"{system.router.url}/ready"):
        assert get(path, "HEAD") == (200, b""), path
    for path in ("/v1/models", "/debug/nodes", "/admin/flush", "/"):
        status, body = get(path)
        assert status == 404 and b"the routes are: GET /health, GET /ready, GET /metrics" in body, body
    assert get("/metrics", Host="evil.example")[0] == 403, "a web page may not read it by DNS rebinding"


def test_a_router_is_not_ready_before_the_nodes_started_with_it_have_joined_once(make_system: Any) -> None:
    system: System = make_system(router={"expect": "prefill=1,decode=2", "local_prefill": "always"})
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    health = system.router.router.dispatcher.health
    wait_until(lambda: system.router.call(lambda: health.is_ready))
    status, body, _ = system.router.request("GET", "/ready")
    assert (status, body["error"]["message"]) == (503, "1 of 2 decode nodes have joined")
    assert system.router.request("GET", "/debug/nodes")[1]["reason"] == "1 of 2 decode nodes have joined"
    assert system.complete()[0] == 200, "requests are served all the same"
    system.cluster.add("decode", "d1")
    system.router.wait_ready()
    system.cluster.by_name("d1").stop()
    wait_until(lambda: system.router.call(lambda: len(system.router.router.dispatcher.registry.nodes) == 2))
    assert system.router.request("GET", "/ready")[0] == 200
