"""The requests of one canary, and the answer that it collects from them."""

from __future__ import annotations

from typing import Any

import pytest

from baton.metadata.wire.node_info import Capacity
from baton.metadata.wire.request import TokenLogprobs
from baton.router.health.canary import IDLE_TIMEOUT_S, NUM_PAGES, NUM_TOKENS, REPEATED, Canary, Prompt, answer_of
from baton.router.health.verdicts import Answer, Token, text
from baton.router.nodes.node import Node, NodeGroup
from baton.router.requests.request import Request
from baton.router.text.tokenizer import TextTokenizer
from baton.router.waiting.entry import Pinned

from ..fake_nodes import make_layout
from ..hellos import ClockedRegistry


@pytest.fixture
def clocked() -> ClockedRegistry:
    return ClockedRegistry()


@pytest.fixture
def nodes(clocked: ClockedRegistry, tokenizer: TextTokenizer) -> tuple[Node, Node]:
    """A prefill and a decode node of one group."""
    prefill, decode = clocked.join(name="p0", role="prefill"), clocked.join(name="d0")
    prefill.group.tokenizer = tokenizer
    return prefill, decode


def canary(group: NodeGroup, nodes: Pinned) -> Canary:
    return Canary(Prompt(group), nodes)


def ids_of(answer: Answer) -> list[int]:
    return [token.id for token in answer]


def answer(canary: Canary, request: Request, *ids: int) -> None:
    """Let the canary's request bring these tokens, each with another token that is 1 behind."""
    (sequence,) = request.sequences
    logprobs = [TokenLogprobs(-0.5, (token, token + 1), (-0.5, -1.5)) for token in ids]
    delta = sequence.merge(len(sequence.received), list(ids), logprobs, None, 0.0)
    assert delta is not None
    canary.on_delta(sequence, delta)


def test_the_prompt_has_several_pages_of_ordinary_tokens(nodes: tuple[Node, Node], tokenizer: TextTokenizer) -> None:
    group = nodes[0].group
    prompt = Prompt(group).ids
    assert prompt == Prompt(group).ids and len(prompt) == NUM_PAGES * group.page_size + 1
    assert not set(prompt) & tokenizer.special_ids and all(0 <= token < group.card.vocab_size for token in prompt)


@pytest.mark.parametrize(
    ("changes", "repeats"),
    [({}, False), ({"rounds_coarsely": True}, True), ({"layout": make_layout(dtype="bfloat16")}, True)],
)
def test_the_prompt_repeats_itself_unless_nodes_compute_in_float32(
    clocked: ClockedRegistry, tokenizer: TextTokenizer, changes: dict[str, Any], repeats: bool
) -> None:
    group = clocked.join(**changes).group
    group.tokenizer = tokenizer
    prompt = Prompt(group).ids
    assert len(set(prompt)) == (REPEATED if repeats else len(prompt))
    assert not repeats or all(token == prompt[index % REPEATED] for index, token in enumerate(prompt))


@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_the_prompt_is_shorter_if_a_node_has_no_room_for_it(
    nodes: tuple[Node, Node], clocked: ClockedRegistry, num_pages: int
) -> None:
    before = Prompt(nodes[0].group)
    clocked.join(name="d1", capacity=Capacity(num_pages=num_pages, page_size=16, max_running=1))
    assert len(Prompt(nodes[0].group).ids) == 16 * num_pages - 2 * NUM_TOKENS
    assert not before.fits and Prompt(nodes[0].group).fits


def test_a_prompt_fits_until_a_node_rounds_more_coarsely(clocked: ClockedRegistry) -> None:
    group = clocked.join().group
    before = Prompt(group)
    assert before.fits
    coarse = clocked.join(name="d1", rounds_coarsely=True)
    assert not before.fits and Prompt(group).fits and Prompt(group).tie_gap > before.tie_gap
    after = Prompt(group)
    clocked.registry.lose(coarse, None, clocked.now)
    assert after.fits, "wide ties suit all"


def test_a_pair_and_a_decode_node_alone_answer_in_one_request(nodes: tuple[Node, Node]) -> None:
    prefill, decode = nodes
    for pinned in ((prefill, decode), (None, decode)):
        each = canary(prefill.group, pinned)
        request = each.next_request(5.0)
        assert (request.params.max_tokens, request.created_at, request.listener) == (NUM_TOKENS, 5.0, each)
        assert request.deadline == 5.0 + IDLE_TIMEOUT_S
        answer(each, request, 7, 8)
        answer(each, request, 9, 10)
        assert each.is_complete and each.answer == tuple(Token(token, frozenset({token})) for token in (7, 8, 9, 10))


def test_a_prefill_node_alone_answers_one_token_per_request(nodes: tuple[Node, Node]) -> None:
    each = canary(nodes[0].group, (nodes[0], None))
    requests = []
    for number, token in enumerate((7, 8, 9, 10)):
        assert not each.is_complete
        request = each.next_request(0.0)
        requests.append(request)
        assert request.params.max_tokens == number + 1
        assert request.sequences[0].received == [7, 8, 9, 10][:number] and request.sequences[0].num_left == 1
        answer(each, request, token)
    assert each.is_complete and ids_of(each.answer) == [7, 8, 9, 10]
    assert len({request.rid for request in requests}) == NUM_TOKENS
    assert len({request.cache_salt for request in requests}) == 1


def test_two_canaries_share_no_cache_salt(nodes: tuple[Node, Node]) -> None:
    salts = {canary(nodes[0].group, nodes).next_request(0.0).cache_salt for _ in range(10)}
    assert len(salts) == 10 and "" not in salts


def test_the_ties_of_a_token_are_those_within_the_gap() -> None:
    entry = TokenLogprobs(-0.5, (1, 2, 3), (-0.5, -0.75, -2.0))
    ties = [answer_of([1], [entry], gap)[0].ties for gap in (0.25, 0.26, 1.5, 1.6)]
    assert ties == [{1}, {1, 2}, {1, 2}, None], "if all named tokens are ties, there may be more"
    one = TokenLogprobs(-0.5, (1,), (-0.5,))
    assert answer_of([1, 2], [one], 9.0) == (Token(1, frozenset({1})), Token(2))
    assert text(answer_of([1, 2], [], 9.0)) == "1 2"
