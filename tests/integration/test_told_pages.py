"""Real processes: the router places prompts by the pages that nodes have told it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cluster import Cluster, wait_until

from baton.metadata.handoff.borrower import FIRST_S

HISTORY = "the quick brown fox jumps over the lazy dog, and then it sleeps. " * 8


def told(cluster: Cluster, node: str) -> float:
    """Return how many cached pages a node has told the router."""
    lines = cluster.get("/metrics")[1].splitlines()
    found = [line for line in lines if line.startswith(f'baton_node_told_pages{{model="tiny-llama",node="{node}"')]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def ask(cluster: Cluster, prompt: str | list[int], **fields: Any) -> tuple[str, int]:
    """Return the text and the number of cached prompt tokens."""
    answer = cluster.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True, **fields)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_next_turn_goes_to_the_node_with_its_pages_also_after_a_restart_of_the_router(
    new_cluster: Callable[..., Cluster],
) -> None:
    """Of idle nodes the router takes the first one. The second one has the pages."""
    cluster = new_cluster().start(prefill=2, decode=1)
    cluster.post("/admin/nodes/prefill-0/drain")
    text, num_cached = ask(cluster, HISTORY)
    assert num_cached == 0
    wait_until(lambda: told(cluster, "prefill-1") > 20, "the node has told its pages")
    cluster.processes["router"].kill()
    cluster.start_router()
    cluster.wait_ready(num_nodes=3)
    wait_until(lambda: told(cluster, "prefill-1") > 20, "the node has told the new router its pages")
    turn = HISTORY + text + " And then?"
    assert ask(cluster, turn, cache_salt="another")[1] == 0
    assert ask(cluster, turn)[1] > 300
    cluster.ledger(flush=True)
    wait_until(lambda: told(cluster, "prefill-1") == 0, "the node has told that its pages are gone")
    assert ask(cluster, turn)[1] == 0


def test_the_next_turn_borrows_what_the_decode_node_wrote(new_cluster: Callable[..., Cluster]) -> None:
    """The prefill node has the prompt of the first turn, and the decode node the answer, too."""
    cluster = new_cluster().start(prefill=1, decode=1)
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    [answer] = cluster.complete(HISTORY, max_tokens=64, **fields)["choices"]
    history = answer["prompt_token_ids"] + answer["token_ids"]
    num_cached = (len(history) - 1) // 16 * 16  # the last token has no KV
    assert num_cached > len(answer["prompt_token_ids"]) // 16 * 16
    pages = cluster.ledger()["nodes"]["decode-0"]["pool"]["cache"]
    wait_until(lambda: told(cluster, "decode-0") == pages, "the node has told the answer's pages")
    turn = [*history, *history[:5]]
    assert ask(cluster, turn, cache_salt="another")[1] == 0
    begun = time.monotonic()
    text, num_found = ask(cluster, turn)
    if time.monotonic() - begun < FIRST_S:  # otherwise it may have been sooner to compute them
        assert num_found == num_cached
    cluster.ledger(flush=True)
    assert ask(cluster, turn) == (text, 0)
