"""vLLM's names on a page that a real router serves: they are there with the flag alone, and repeat Baton's values."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from ..conftest import System

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
SAME = {  # with `model_name` for `model`
    "vllm:num_requests_waiting": "baton_model_waiting_requests",
    "vllm:num_requests_running": "baton_model_running_requests",
    "vllm:kv_cache_usage_perc": "baton_model_kv_usage",
    "vllm:time_to_first_token_seconds_bucket": "baton_ttft_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum": "baton_itl_seconds_sum",
    "vllm:e2e_request_latency_seconds_count": "baton_e2e_seconds_count",
    "vllm:request_queue_time_seconds_bucket": "baton_queue_seconds_bucket",
    "vllm:prefix_cache_queries_total": "baton_prompt_tokens_total",
    "vllm:prefix_cache_hits_total": "baton_cached_tokens_total",
    "vllm:prompt_tokens_total": "baton_prompt_tokens_total",
    "vllm:generation_tokens_total": "baton_output_tokens_total",
}


def scrape(system: System) -> tuple[Series, dict[str, str]]:
    """Return the value of each series, and the type of each metric."""
    _, page, _ = system.router.request("GET", "/metrics")
    families = list(text_string_to_metric_families(page.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "each metric is described once"
    series = {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}
    return series, {family.name: family.type for family in families}


def test_the_names_are_there_with_the_flag_alone(make_system: Callable[..., System]) -> None:
    system = make_system(router={"metrics_names": "vllm"}, num_pages=512).up(num_decode=2)
    assert system.complete()[0] == 200
    assert system.complete(max_tokens=2, n=2)[0] == 200
    system.router.wait_idle()
    series, types = scrape(system)
    for theirs, ours in SAME.items():
        found = {labels: value for (name, labels), value in series.items() if name == theirs}
        expected = {
            frozenset(("model_name" if label == "model" else label, value) for label, value in labels): value
            for (name, labels), value in series.items()
            if name == ours
        }
        assert found == expected and found, theirs

    info = frozenset({"model_name": "fake", "block_size": "16", "num_gpu_blocks": "1024"}.items())
    assert series["vllm:cache_config_info", info] == 1
    reasons = {dict(labels)["finished_reason"]: value for (name, labels), value in series.items() if "_success" in name}
    assert reasons == {"stop": 1, "length": 2}, "as vLLM, one per output"
    assert types["vllm:time_to_first_token_seconds"] == "histogram" and types["vllm:request_success"] == "counter"

    system.router.router.metrics.count_request("fake", "cancelled")
    system.router.router.metrics.count_request("fake", "refused")
    series, _ = scrape(system)
    reasons = {dict(labels)["finished_reason"]: value for (name, labels), value in series.items() if "_success" in name}
    assert reasons == {"stop": 1, "length": 2, "abort": 1}, "what was never taken in is no end"


def test_nothing_of_them_is_there_without_it(system: System) -> None:
    assert not [name for name in scrape(system)[1] if name.startswith("vllm")]
