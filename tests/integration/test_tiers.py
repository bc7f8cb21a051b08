"""Real processes with host and disk tiers: conversations go on from them, also after a node was killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import Cluster, wait_until

TEXTS = [f"Chapter {number}: the quick brown fox jumps over the lazy dog {number} times. " * 6 for number in range(6)]
POOL = ["--num-pages", "70", "--page-size", "16"]


def metric(cluster: Cluster, name: str, node: str) -> float:
    lines = cluster.get("/metrics")[1].splitlines()
    found = [line for line in lines if line.startswith(f"baton_node_{name}{{") and f'node="{node}"' in line]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def ask(cluster: Cluster, prompt: str) -> tuple[str, int, str]:
    """Return the text, the number of cached prompt tokens, and the request's id."""
    answer = cluster.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["id"]


def spans(cluster: Cluster, rid: str) -> list[dict[str, Any]]:
    status, body = cluster.get(f"/debug/requests/{rid}")
    assert status == 200, body
    return body["requests"][0]["choices"][0]["parts"]


def test_a_killed_node_finds_the_files_of_its_conversations_again(
    new_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """A damaged file costs its pages, and nothing else."""
    files = tmp_path / "files"
    tiers = ["--host-cache-gb", "0.02", "--disk-cache", str(files)]
    cluster = new_cluster()
    cluster.start_router("--local-prefill", "never")
    cluster.start_node("prefill", "prefill-0", *POOL, *tiers)
    cluster.start_node("decode", "decode-0", *POOL)
    cluster.wait_ready(num_nodes=2)
    first = [ask(cluster, text) for text in TEXTS]
    wait_until(lambda: metric(cluster, "files_written_total", "prefill-0") > 20, "pages are evicted and written")
    before = [ask(cluster, text)[:2] for text in TEXTS]
    assert [text for text, _ in before] == [text for text, _, _ in first]
    assert all(num_cached > 250 for _, num_cached in before), "the pool holds two of the texts alone"
    *_, rid = ask(cluster, TEXTS[0])
    assert any(span.get("num_restored", 0) > 250 for span in spans(cluster, rid)), spans(cluster, rid)
    paths, most_cached = sorted(files.glob("*/*.page")), 0
    for path in paths[::30]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    for _ in range(4):  # a busy disk may take longer than a prompt waits
        cluster.processes["prefill-0"].kill()
        cluster.start_node("prefill", "prefill-0", *POOL, *tiers)
        cluster.wait_ready(num_nodes=2)
        wait_until(lambda: metric(cluster, "cache_file_bytes", "prefill-0") > 100_000, "the files are found")
        after = [ask(cluster, text) for text in TEXTS]
        assert [text for text, *_ in after] == [text for text, *_ in first]
        most_cached = max(most_cached, sum(num_cached > 250 for _, num_cached, _ in after))
        if most_cached > 1:
            break
    assert most_cached > 1
    assert metric(cluster, "files_read_total", "prefill-0") > 20
    books = cluster.ledger(flush=True)["nodes"]["prefill-0"]
    assert books["host_tier"]["pages"]["cache"] == 0
    wait_until(lambda: not list(files.glob("*/*.page")), "a flush removes the files")
