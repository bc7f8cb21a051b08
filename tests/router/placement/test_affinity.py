"""Affinity: bounded memories of the pages and the sessions that nodes were given."""

from __future__ import annotations

from collections.abc import Callable

from baton.metadata.wire import messages as m
from baton.router.nodes.told_pages import ExpectedPages
from baton.router.placement.node_choice import SessionAffinity

from ..conftest import System
from ..dispatching.test_runner import own


def test_the_sessions_that_are_idle_longest_are_forgotten() -> None:
    sessions = SessionAffinity(max_sessions=2)
    assert sessions.node_of(b"a") is None
    for session, node in ((b"a", 1), (b"b", 2), (b"a", 3), (b"c", 4), (None, 5)):
        sessions.note(session, node)
    assert [sessions.node_of(session) for session in (b"a", b"b", b"c", None)] == [3, None, 4, None]


def test_expected_pages_are_bounded_and_the_ends_of_prompts_are_forgotten_first() -> None:
    pages = ExpectedPages(max_pages=4)
    pages.note("a", [1, 2, 3], 0.0, since=0.0)
    assert pages.num_matched("a", [1, 2, 3, 4], since=0.0) == 3
    assert pages.num_matched("a", [1, 9, 3], since=0.0) == 1
    assert pages.num_matched("b", [1, 2, 3], since=0.0) == 0
    pages.note("a", [7, 8], 0.0, since=0.0)
    assert pages.num_matched("a", [7, 8], since=0.0) == 2
    assert pages.num_matched("a", [1, 2, 3], since=0.0) == 2
    pages.forget("a")
    assert pages.num_matched("a", [7, 8], since=0.0) == 0


def test_pages_that_a_node_has_told_since_are_not_expected() -> None:
    pages = ExpectedPages()
    pages.note("a", [1, 2], 10.0, since=0.0)
    pages.note("a", [1, 2, 3], 11.0, since=0.0)
    assert pages.num_matched("a", [1, 2, 3], since=11.0) == 3
    assert pages.num_matched("a", [1, 2, 3], since=11.1) == 0
    pages.note("a", [7], 13.0, since=12.0)
    assert pages.num_matched("a", [1, 2, 3], since=0.0) == 0, "what nobody asks for takes no memory"


def test_equal_prefixes_meet_on_one_prefill_node(make_system: Callable[..., System]) -> None:
    system = make_system().up(2, 1)
    prefix = "the quick brown fox jumps over lazy dogs " * 3
    for place in range(6):
        system.complete(prompt=f"{prefix}{place}")
    assert sorted(len(own(node, m.Prefill)) for node in system.cluster.nodes if node.role == "prefill") == [0, 6]
