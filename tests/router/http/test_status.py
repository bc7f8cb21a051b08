"""Routes for probes and monitoring."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from ..conftest import System


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
