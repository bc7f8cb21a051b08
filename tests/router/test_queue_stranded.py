"""Who waits for a node that is not there, for how long, and what the error says then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.errors import Unavailable
from baton.router.errors import NodeFault
from baton.router.queue import Bounds, Entry, Queues


def node(num_pages: int = 100) -> Any:
    capacity = SimpleNamespace(num_pages=num_pages, max_running=8)
    model = SimpleNamespace(context_len=1000)
    return SimpleNamespace(hello=SimpleNamespace(capacity=capacity, model=model), routing_id=b"d0")


class Group:
    """Nodes of both roles; every prefill makes a pair with every decode node."""

    key = SimpleNamespace(model="fake")
    page_size = 16
    layout = SimpleNamespace(page_size=16, key_lookahead=0)

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.by_role = {"prefill": [node() for _ in range(prefill)], "decode": [node() for _ in range(decode)]}
        self.nodes: dict[bytes, Any] = {}

    def live(self, role: str) -> list[Any]:
        return self.by_role[role]

    def pairs(self) -> Any:
        return ((prefill, decode) for prefill in self.by_role["prefill"] for decode in self.by_role["decode"])

    @property
    def is_paired(self) -> bool:
        return any(True for _ in self.pairs())

    def most_pages(self, role: str) -> int:
        return max((each.hello.capacity.num_pages for each in self.by_role[role]), default=0)


class Waiting:
    """One entry that waits 10 s for nodes, looked at four times a second."""

    def __init__(self, group: Any, *, is_usable: bool = True, needs_decode: bool = True, **entry: Any) -> None:
        self.group, self.is_usable, self.now = group, is_usable, 100.0
        self.errors: list[Any] = []
        self.queues = Queues(Bounds(4, 100, 60.0, node_wait_s=10.0))
        request: Any = SimpleNamespace(
            is_over=False,
            created_at=0.0,
            priority=0,
            group=group,
            prompt_ids=[5] * 160,
            cache_salt="",
            params=SimpleNamespace(max_tokens=100),
            sequences=[SimpleNamespace(received=[], num_left=100 if needs_decode else 1, finish_reason=None)],
        )
        self.entry: Any = Entry(request, (0,))
        self.queues.add(self.entry)
        for name, value in entry.items():
            setattr(self.entry, name, value)

    def after(self, seconds: float) -> list[Any]:
        """The errors so far, this much later."""
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            pairs = list(self.group.pairs()) if self.is_usable else []
            refused = self.queues.stranded(self.group, pairs, lambda _: "pair p0 -> d0: secret words", self.now)
            self.errors += [error for _, error in refused]
        return self.errors


@pytest.mark.parametrize("missing", ["prefill", "decode", "both"])
def test_who_has_no_node_waits_as_long_as_stated_and_is_told_which(missing: str) -> None:
    group = Group(prefill=missing == "decode", decode=missing == "prefill")
    waiting = Waiting(group)
    assert waiting.after(10.0) == []
    (error,) = waiting.after(0.5)[:1]
    words = "no prefill and no decode node is left" if missing == "both" else f"no {missing} node is left"
    assert isinstance(error, Unavailable) and words in str(error) and "10 s" in str(error)


def test_a_node_that_comes_in_time_starts_the_count_anew() -> None:
    waiting = Waiting(Group(decode=0))
    assert waiting.after(9.0) == []
    waiting.group.by_role["decode"].append(node())
    waiting.after(0.25)
    waiting.group.by_role["decode"].clear()
    assert waiting.after(9.0) == []
    assert len(waiting.after(2.0)[:1]) == 1


@pytest.mark.parametrize("change", [{"attempt": object()}, {"request": SimpleNamespace(is_over=True)}])
def test_who_is_being_asked_for_or_is_over_is_not_stranded(change: dict[str, Any]) -> None:
    waiting = Waiting(Group(decode=0), **change)
    assert waiting.after(30.0) == []


def test_one_token_needs_no_decode_node() -> None:
    assert Waiting(Group(decode=0), needs_decode=False).after(30.0) == []
    assert Waiting(Group(prefill=0), needs_decode=False).after(30.0)


@pytest.mark.parametrize(("role", "num_pages"), [("prefill", 10), ("decode", 11)])
def test_a_pool_that_was_large_enough_is_waited_for(role: str, num_pages: int) -> None:
    """The prompt takes 10 pages of a prefill node, and with room to generate 11 of a decode node."""
    group = Group(decode=2, prefill=2)
    for each in group.by_role[role]:
        each.hello.capacity.num_pages = num_pages
    assert Waiting(group).after(30.0) == []
    for each in group.by_role[role]:
        each.hello.capacity.num_pages = num_pages - 1
    assert "none has room for the 11 pages" in str(Waiting(group).after(30.0)[0])


def test_large_pools_that_make_no_pair_are_none() -> None:
    """A large prefill node works with a small decode node alone, and the other way round."""
    group: Any = Group(decode=2, prefill=2)
    large_prefill, small_prefill = group.by_role["prefill"]
    large_decode, small_decode = group.by_role["decode"]
    small_prefill.hello.capacity.num_pages = small_decode.hello.capacity.num_pages = 5
    group.pairs = lambda: [(large_prefill, small_decode), (small_prefill, large_decode)]
    assert Waiting(group).after(30.0)


def test_pairs_that_do_not_work_are_waited_for_and_their_words_kept_inside() -> None:
    waiting = Waiting(Group(), is_usable=False)
    assert waiting.after(10.0) == []
    error = waiting.after(0.5)[0]
    assert isinstance(error, NodeFault) and "secret words" in str(error) and "secret words" not in error.shown


def test_new_requests_may_wait_where_others_were_served_lately() -> None:
    waiting = Waiting(Group())
    group, may_wait = waiting.group, waiting.queues.may_wait
    assert may_wait(group, 0.0)  # it can serve
    waiting.after(0.25)
    group.by_role["decode"].clear()
    assert may_wait(group, waiting.now + 10.0) and not may_wait(group, waiting.now + 10.1)
    waiting.queues.has_served(group, waiting.now + 5.0)
    assert may_wait(group, waiting.now + 15.0)
    waiting.queues.withdraw(waiting.entry.request)
    waiting.queues.forget(group)
    assert not may_wait(group, waiting.now)
    assert not may_wait(Group(decode=0), 0.0)  # never served anybody


def test_a_pair_that_takes_nobody_does_not_serve() -> None:
    waiting = Waiting(Group(), is_usable=False)
    waiting.after(1.0)
    waiting.group.by_role["decode"].clear()
    assert not waiting.queues.may_wait(waiting.group, waiting.now)
