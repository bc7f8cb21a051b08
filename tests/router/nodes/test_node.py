"""The books of a node balance after any events in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.metadata.wire.membership import Heartbeat
from baton.metadata.wire.node_info import Load, NodeStats
from baton.router.nodes.node import FULL_S

from ..sites import add_node, make_group

KEYS = [(rid, attempt) for rid in ("a", "b") for attempt in (0, 1)]
CHOICES = st.sets(st.integers(0, 3))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.sampled_from(KEYS), CHOICES.filter(bool), st.integers(0, 9)),
        st.tuples(st.sampled_from(["grant", "release"]), st.sampled_from(KEYS), CHOICES, st.just(0)),
        st.tuples(st.just("refuse"), st.sampled_from(KEYS), st.just(set[int]()), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_books_of_a_decode_node_balance(steps: list[tuple[str, tuple[str, int], set[int], int]]) -> None:
    node = add_node(make_group(), "decode", "d0")
    books: dict[tuple[str, int], tuple[set[int], int]] = {}  # choices, pages pledged per choice
    for name, key, choices, pages in steps:
        held, pledge = books.pop(key, (set[int](), 0))
        if name == "reserve" and not held:
            node.reserve(*key, choices, pages)
            held, pledge = set(choices), pages
        elif name == "grant":
            node.grant(*key, choices)
            held, pledge = held & choices, 0
        elif name == "release":
            node.release(*key, choices)
            held -= choices
        elif name == "refuse":
            node.grant(*key, ())
            node.refuse(1.0)
            held = set()
        if held:
            books[key] = held, pledge
        assert node.num_units == sum(len(held) for held, _ in books.values())
        assert node.pledged_pages == sum(len(held) * pledge for held, pledge in books.values())
        assert node.room == 100 - node.pledged_pages
        assert {key: node.units_of(*key) for key in KEYS} == {key: books.get(key, (set(), 0))[0] for key in KEYS}
    for key in KEYS:
        node.release(*key, range(4))
    assert node.holds_nothing and node.is_empty and node.room == 100


def test_prompts_are_counted_until_they_end() -> None:
    node = add_node(make_group(), "prefill", "p0")
    node.begin_prompt("a", 0, 10, 0.0)
    node.begin_prompt("a", 1, 5, 0.0)
    assert (node.num_prompts, node.num_prompt_tokens, node.holds_nothing) == (2, 15, False)
    node.end_prompt("a", 0)
    node.end_prompt("a", 0)  # a second time does nothing
    node.end_prompt("b", 0)
    assert (node.num_prompts, node.num_prompt_tokens) == (1, 5)
    node.end_prompt("a", 1)
    assert node.holds_nothing


def load(free_pages: int, running: int = 1) -> Load:
    return Load(free_pages=free_pages, running=running, waiting=0)


def test_a_node_that_refused_is_full_until_it_shows_more_room_or_a_while_has_passed() -> None:
    node = add_node(make_group(), "decode", "d0")
    node.report(load(5), 1.0)
    node.refuse(10.0)
    node.report(load(5), 1.0)
    assert node.is_full(10.0 + FULL_S) and not node.is_full(10.1 + FULL_S)
    node.report(load(6), 1.0)
    assert not node.is_full(10.0), "more room"
    node.refuse(10.0)
    node.report(load(6, running=0), 1.0)
    assert not node.is_full(10.0), "nothing runs"
    node.refuse(10.0)
    node.make_room(load(0), 1.0)
    assert not node.is_full(10.0), "it said so"


def test_only_a_healthy_node_that_is_not_draining_takes_new_work() -> None:
    group = make_group()
    node: Any = add_node(group, "decode", "d0")
    assert group.live("decode") == [node] and not node.is_draining
    node.lose_touch()
    assert not group.live("decode") and not node.is_draining
    node.heard(Heartbeat(1, "idle", 0.0, 10.0, load(7), NodeStats(steps=3)), 5.0)
    assert group.live("decode") and (node.last_seen, node.load.free_pages, node.stats.steps) == (5.0, 7, 3)
    node.cordon(evict_at=8.0)
    assert not group.live("decode") and node.is_draining
    assert [node.must_evict(now) for now in (7.9, 8.0)] == [False, True]
    node.evicted()
    assert not node.must_evict(9.0) and node.is_cordoned
    node.uncordon()
    assert group.live("decode")
    node.leave()
    assert not group.live("decode") and node.is_leaving


def test_a_request_finds_room_only_beside_free_tail_pages() -> None:
    node = add_node(make_group(), "decode", "d0", num_pages=100)
    node.report(Load(30, 1, 0, free_tails=5), 1.0)
    assert (node.room_for(0), node.room_for(5), node.room_for(6)) == (30, 30, 0)
    node.reserve("a", 0, {0, 1}, 10, 2)
    assert (node.room_for(1), node.room_for(2)) == (10, 0), "the node has not answered for four of them"
    node.grant("a", 0, {0})
    node.report(Load(20, 2, 0, free_tails=3), 1.0)
    assert node.room_for(3) == 20, "the node's figures count what it granted"
    node.release("a", 0, {0})
    assert node.holds_nothing
