"""Nodes of all roles borrow what the turn before left on another node, which is drained meanwhile.

The nodes are real, in one process, stepped by the test (tests/support/nodes/served.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from served import Served


class Case(NamedTuple):
    """A cluster, the role of which the node with most pages is drained after the first turn, whether the decode nodes
    lose their caches then, and how many tokens the second turn borrows."""

    num_prefill: int
    num_decode: int
    drained: str
    flushes_decode: bool
    num_borrowed: int


PROMPT = [*range(300, 420)]  # 7 whole pages; with the answer, of which the last token has no KV, 9
CASES = {
    "prefill to prefill": Case(2, 1, "prefill", True, 7 * 16),
    "decode to prefill": Case(1, 2, "decode", False, 2 * 16),
    "decode to decode": Case(0, 2, "decode", False, 9 * 16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_next_turn_borrows_what_a_drained_node_has(start: Callable[..., Served], name: str) -> None:
    case = CASES[name]
    local_prefill = "never" if case.num_prefill else "always"
    served = start(router={"local_prefill": local_prefill}, num_pages=200, page_size=16).up(
        case.num_prefill, case.num_decode
    )
    for node in served.nodes.values():
        assert node._borrower is not None
        node._borrower._token_s = lambda: 1.0  # whatever else this machine does, borrowing is sooner
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    first = served.ask(prompt=PROMPT, **fields)
    served.finish(first)
    for decode in (node for each, node in served.nodes.items() if each.startswith("decode") and case.flushes_decode):
        decode.cache.flush()
    wait_for_news(served)
    drained = [each for each in served.nodes if each.startswith(case.drained)]
    holder = max(drained, key=lambda each: served.nodes[each].cache.num_pages)
    served.call(lambda: served.dispatcher.drain(holder, None))

    turn = [*PROMPT, *first.ids[0], *range(420, 430)]
    second = served.ask(prompt=turn, **fields)
    served.finish(second)
    assert sum(node.stats().borrowed_tokens for node in served.nodes.values()) == case.num_borrowed
    assert second.usage["prompt_tokens_details"]["cached_tokens"] == (7 if case.flushes_decode else 9) * 16
    for node in served.nodes.values():
        node.cache.flush()
    wait_for_news(served)
    again = served.ask(prompt=turn, **fields)
    served.finish(again)
    assert again.ids == second.ids
    assert again.usage["prompt_tokens_details"]["cached_tokens"] == 0
    served.check_books()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_leaves_hands_its_conversations_on(start: Callable[..., Served], role: str) -> None:
    """It leaves when the other one of its role has them, which then serves the next turn from its own cache."""
    local_prefill, sizes = {"prefill": ("never", (2, 1)), "decode": ("always", (0, 2))}[role]
    served = start(router={"local_prefill": local_prefill}, num_pages=200, page_size=16).up(*sizes)
    for node in served.nodes.values():
        assert node._borrower is not None
        node._borrower._token_s = lambda: 1.0
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    prompts = [PROMPT, [*range(500, 560)]]
    first = [served.ask(prompt=prompt, **fields) for prompt in prompts]
    for request in first:
        served.finish(request)
    wait_for_news(served)
    own = {each: node for each, node in served.nodes.items() if each.startswith(role)}
    name = max(own, key=lambda each: own[each].cache.num_pages)
    leaving = own[name]
    [heir] = [node for each, node in own.items() if each != name]
    texts = list(leaving.cache.texts())
    assert any(text.token_ids[:112] == PROMPT[:112] for text in texts)
    leaving.membership.leave("a test")
    served.run(lambda: leaving.membership.is_over)
    assert leaving.is_idle and heir.stats().borrowed_tokens > 0
    assert all(heir.cache.match(text.token_ids, text.salt) == text.num_pages for text in texts)
    assert heir.cache.ledger().request == 0 and not heir.tickets()


def wait_for_news(served: Served) -> None:
    """Step until all nodes have told the router what they have cached."""

    def is_told() -> bool:
        nodes = served.dispatcher.registry.nodes.values()
        return all(len(node.cache) == served.nodes[node.node_id].cache.num_pages for node in nodes)

    served.run(lambda: served.call(is_told))
