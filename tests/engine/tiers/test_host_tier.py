"""The host tier: random lives of texts, whose bytes are compared after every way through pool and slots."""

from __future__ import annotations

import random
import time

import pytest
from tiered_node import PAGE, Node

from baton.engine.state.pages import Owner


@pytest.mark.parametrize(
    ("num_slots", "num_tails", "least"), [(0, 0, 0), (1, 0, 0), (7, 0, 5), (60, 0, 20), (8, 12, 3), (60, 12, 20)]
)
@pytest.mark.parametrize("lookahead", [0, 2])
def test_what_a_prompt_finds_is_what_was_computed_for_its_tokens(
    num_slots: int, num_tails: int, least: int, lookahead: int
) -> None:
    node = Node(16, num_slots, num_tails=num_tails, lookahead=lookahead)
    rng = random.Random(num_slots)
    num_restored = 0
    for step in range(300):
        text = [rng.randrange(2) for _ in range(rng.randint(0, 12))] + [rng.randrange(2)] * rng.randint(3, 30)
        match rng.randrange(12):
            case 0:
                node.cache.evict(rng.randint(1, 20))
            case 1 if step % 40 == 0:
                node.cache.flush()
                assert not node.cache.first_pages() and node.tier.kept.num_used == node.tier.tails.num_used == 0
            case _:
                num_restored += node.run(text, rng.choice(["", "a"]))
        node.check_books()
    assert num_restored >= least


def test_a_second_pass_over_three_times_the_pool_computes_only_last_pages() -> None:
    texts = [random.Random(seed).choices(range(100), k=10 * PAGE) for seed in range(6)]
    computed: list[int] = []
    for num_slots in (0, 60):
        node = Node(21, num_slots)
        for text in texts:
            node.run(text)
        node.num_computed = 0
        for text in texts:
            node.run(text)
        computed.append(node.num_computed)
    assert computed == [60, 6]


def test_more_pages_than_slots_are_evicted_with_some_that_have_slots() -> None:
    node = Node(25, 4)
    first, second = list(range(4 * PAGE + 1)), list(range(100, 100 + 12 * PAGE))
    node.run(first)
    node.cache.evict(25)
    assert node.run([*first, 1]) == 4
    node.run(second)
    node.cache.evict(25)
    node.check_books()
    assert node.tier.kept.num_used == 4


def test_nothing_is_restored_for_a_request_that_has_no_room() -> None:
    node = Node(11, 60)
    text = list(range(8 * PAGE))
    node.run(text)
    held = node.cache.allocate(6, Owner.REQUEST)
    assert node.cache.restore(text, num_pages=9) == 0
    assert node.tier.num_restored == 0
    assert node.cache.restore(text, num_pages=8) == 0, "five pages are pinned or free beside those held"
    node.cache.pool.release(held)
    assert node.cache.restore(text, num_pages=8) > 0


def test_a_tier_that_is_slower_than_computing_is_not_asked() -> None:
    node = Node(11, 60)
    text = list(range(8 * PAGE))
    node.run(text)
    node.cache.evict(10)
    node.tier._page_s.observe(1.0, time.monotonic())
    node.tier.compute_token_s = lambda: 0.1
    assert node.cache.restore(text, num_pages=8) == 0
    node.tier.compute_token_s = lambda: 0.3
    assert node.cache.restore(text, num_pages=8) == 8
