"""Figures of the whole service: those of tenants, and those that gateways read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from baton.router.figures.service_figures import MAX_TENANTS, OTHER, ServiceFigures, TenantFigures, kv_usage


def figures(collector: Any) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_at_most_200_tenants_have_series_and_the_rest_is_counted_together() -> None:
    tenants = TenantFigures()
    names = [f"t{index}" for index in range(MAX_TENANTS + 50)]
    for name in names:
        tenants.counts[name].outcomes["done"] += 1
        tenants.counts[name].num_output += 2
    tenants.counts[OTHER].num_output += 2
    tenants.num_waiting = lambda: {"t0": 3, names[-1]: 4, names[-2]: 5, "new": 1}
    found = figures(tenants)
    requests = {name: value for name, value in found.items() if name.startswith("baton_tenant_requests_total")}
    assert len(requests) == MAX_TENANTS, "the default tenant has no request; the rest has one series"
    assert sum(requests.values()) == len(names)
    assert found[f'baton_tenant_output_tokens_total{{tenant="{OTHER}"}}'] == 2 * 51 + 2
    assert found['baton_tenant_waiting_requests{tenant="t0"}'] == 3
    assert found[f'baton_tenant_waiting_requests{{tenant="{OTHER}"}}'] == 10


def test_one_tenant_has_its_series_from_the_start() -> None:
    found = figures(TenantFigures())
    assert found['baton_tenant_waiting_requests{tenant="default"}'] == 0
    assert found['baton_tenant_output_tokens_total{tenant="default"}'] == 0
    assert not any(OTHER in name for name in found)


def node(role: str, num_pages: int, num_free: int, num_tails: int = 0) -> Any:
    capacity = SimpleNamespace(num_pages=num_pages, page_size=16, num_tails=num_tails)
    return SimpleNamespace(
        role=role, hello=SimpleNamespace(capacity=capacity), load=SimpleNamespace(free_pages=num_free, free_tails=0)
    )


def test_the_use_of_kv_is_that_of_decode_nodes() -> None:
    assert kv_usage([]) == 0.0
    assert kv_usage([node("prefill", 100, 0), node("decode", 100, 75), node("decode", 300, 225)]) == 0.25
    assert kv_usage([node("prefill", 100, 40)]) == 0.6
    assert kv_usage([node("decode", 100, 40, num_tails=9)]) == 1.0, "none of the tail pages is free"
    assert kv_usage([node("decode", 0, 0)]) == 0.0 and kv_usage([node("decode", 10, 12)]) == 0.0


def test_load_is_told_in_all_and_by_model() -> None:
    def request(model: str, *, is_canary: bool = False, dispatched: bool = True) -> Any:
        group = SimpleNamespace(key=SimpleNamespace(model=model))
        attempts = {0: SimpleNamespace(dispatched=dispatched)}
        return SimpleNamespace(group=group, is_canary=is_canary, attempts=attempts)

    a, b = (SimpleNamespace(key=SimpleNamespace(model=name), nodes={}) for name in "ab")
    a.nodes[b"d"] = node("decode", 10, 5)
    registry: Any = SimpleNamespace(groups={1: a, 2: b}, nodes=a.nodes)
    queues: Any = SimpleNamespace(waiting_in=lambda group: [0] * (3 if group is b else 0))
    requests: Any = {
        "1": request("a"),
        "2": request("a", is_canary=True),
        "3": request("b", dispatched=False),
        "4": request("b"),
    }
    collector = ServiceFigures(registry, queues, requests, lambda: False)
    assert figures(collector) == {
        "baton_ready": 0,
        "baton_running_requests": 2,
        "baton_kv_usage": 0.5,
        'baton_model_running_requests{model="a"}': 1,
        'baton_model_running_requests{model="b"}': 1,
        'baton_model_waiting_requests{model="a"}': 0,
        'baton_model_waiting_requests{model="b"}': 3,
        'baton_model_kv_usage{model="a"}': 0.5,
        'baton_model_kv_usage{model="b"}': 0.0,
        'baton_kv_cache_info{model="a",num_pages="10",page_size="16"}': 1,
    }
