"""Node choice compares decode nodes for a prompt that a prefill node computes, and collects the figures of all nodes
(`EntryFigures`). prompt_placement.py compares the nodes that could compute the prompt.

`choose_decode` is pure. `decode_reason` says in words why a node was chosen, from the figures that were compared, and
returns "" if there was only one node to choose from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ...metadata.wire.node_info import Lender
from ..nodes.node import Node, Role
from ..nodes.told_pages import ExpectedPages
from ..waiting.entry import Entry
from .prompt_placement import (
    LOAD_ROUNDS,
    SESSION_SLACK,
    LocalFigures,
    RemoteFigures,
    load_reason,
)

MAX_SESSIONS = 32768  # remembered per role
EXPECTED_S = 2.0  # a node tells pages so soon after it has computed them


class DecodeFigures(NamedTuple):
    """Figures by which `choose_decode` compares decode nodes."""

    room: int  # free pages of its largest pool, without those of reservations under way
    num_running: int  # with reservations under way
    max_running: int
    is_full: bool  # it refused, and has not shown more room since
    is_sessions: bool = False  # it served the request's session last
    cached_share: float = 0.0  # of the prompt, in its prefix cache
    handoff_s: float = 0.0  # of a prompt, the median of the last ones; 0: unknown
    round_s: float = 0.0  # 0: unknown

    @property
    def slack(self) -> float:
        """How much fuller than others the node may be, as a share of its places, SESSION_SLACK at most.

        The node that served the request's session last gets SESSION_SLACK. Another node gets as many places as
        sequences that would cost as much time as its cached pages save of the handoff."""
        if self.is_sessions:
            return SESSION_SLACK
        if not self.handoff_s or not self.round_s:
            return SESSION_SLACK * self.cached_share
        saved_s = self.handoff_s * self.cached_share
        return min(SESSION_SLACK, saved_s / (LOAD_ROUNDS * self.round_s * self.max_running))

    @property
    def load(self) -> float:
        """The share of its places that are taken, less the slack."""
        return self.num_running / self.max_running - self.slack


def choose_decode(figures: Sequence[DecodeFigures], num_pages: int) -> int | None:
    """Return the index of the least loaded node with room for `num_pages`, None if all are full. The session's node,
    and one that has pages of the prompt, may be a little fuller (`DecodeFigures.slack`)."""
    return min(
        _with_room(figures, num_pages),
        key=lambda index: (figures[index].load, -figures[index].room),
        default=None,
    )


def decode_reason(figures: Sequence[DecodeFigures], num_pages: int, index: int) -> str:
    """Return why `choose_decode` returned this index, "" if no other node has room."""
    others = [figures[each] for each in _with_room(figures, num_pages) if each != index]
    if not others:
        return ""
    chosen = figures[index]
    without = [*others, chosen._replace(cached_share=0.0)]
    if chosen.cached_share and not chosen.is_sessions and choose_decode(without, num_pages) != len(others):
        least = min(others, key=lambda each: each.num_running / each.max_running)
        return (
            f"it has {chosen.cached_share:.0%} of the prompt in its prefix cache: {chosen.num_running} running of "
            f"{chosen.max_running}, elsewhere {least.num_running} of {least.max_running}"
        )
    return load_reason(chosen, others)


def _with_room(figures: Sequence[DecodeFigures], num_pages: int) -> list[int]:
    return [
        index
        for index, node in enumerate(figures)
        if not node.is_full and node.room >= num_pages and node.num_running < node.max_running
    ]


def only_reason(role: Role, num_live: int, num_able: int, *, has_failed: bool) -> str:
    """Return why a node was chosen that was compared with no other. `num_live`: nodes of its role that take new work.
    `num_able`: those of them that could take the request, however busy. `has_failed`: the request failed on a node."""
    if num_live <= 1:
        return f"the only {role} node"
    if num_able > 1:
        return f"the only one of {num_able} {role} nodes that has room now"
    failed = ", or the request failed there" if has_failed else ""
    return f"the only one of {num_live} {role} nodes that can serve it: others are not ready or too small{failed}"


class SessionAffinity:
    """The node of one role that served each session last. Bounded; the sessions that are idle longest are forgotten."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._nodes: OrderedDict[bytes, Hashable] = OrderedDict()

    def node_of(self, session: bytes | None) -> Hashable:
        """Return the node that served the session last, None if there is none."""
        return None if session is None else self._nodes.get(session)

    def note(self, session: bytes | None, node: Hashable) -> None:
        """The node serves the session now."""
        if session is None:
            return
        self._nodes[session] = node
        self._nodes.move_to_end(session)
        if len(self._nodes) > self._max_sessions:
            self._nodes.popitem(last=False)


class EntryFigures:
    """The figures of nodes for one entry: queue, room, pages of the prompt that they have, and whether they served its
    session last."""

    def __init__(self) -> None:
        self._expected = ExpectedPages()
        self._prefill_sessions, self._decode_sessions = SessionAffinity(), SessionAffinity()

    def begin_prompt(self, node: Node, entry: Entry, attempt: int, now: float) -> int:
        """Enter the prompt of an entry in the books of the node that computes it. Return how many tokens it will
        probably compute."""
        num_uncached = self._num_uncached(node, entry, now)
        node.begin_prompt(entry.request.rid, attempt, num_uncached, now)
        self._expected.note(node.routing_id, entry.names, now, _expected_since(node, now))
        if node.role == "prefill":
            self._prefill_sessions.note(entry.request.session, node.routing_id)
        return num_uncached

    def lender(self, node: Node, entry: Entry, now: float) -> Lender | None:
        """Return the node that has told most leading pages of a prompt, if these are more than the node has that
        computes the prompt, and if it can borrow them; otherwise None. To be called before `begin_prompt`."""
        if entry.pair is not None or entry.request.needs_prompt_logprobs or not node.hello.borrows:
            return None
        others = [
            each
            for each in entry.request.group.nodes.values()
            if each is not node and each.lends and each.shares_protocol(node) and each.cache.state(now) == "whole"
        ]
        num_told, index = max(
            (
                (each.cache.num_matched(entry.names, entry.request.group.num_tails), -index)
                for index, each in enumerate(others)
            ),
            default=(0, 0),
        )
        if num_told == 0 or num_told <= self._num_cached_pages(node, entry, now):
            return None
        return Lender(others[-index].peer_of(node), num_told)

    def will_cache(self, decode: Node, entry: Entry, now: float) -> None:
        """A decode node gets an entry. It keeps the pages of the prompt in its cache, whoever computes them."""
        self._decode_sessions.note(entry.request.session, decode.routing_id)
        if entry.request.group.may_compute_locally:
            self._expected.note(decode.routing_id, entry.names, now, _expected_since(decode, now))

    def forget_cache(self, node: Node) -> None:
        """The node is gone, or its prefix cache was emptied."""
        self._expected.forget(node.routing_id)

    def decode(self, node: Node, entry: Entry, now: float) -> DecodeFigures:
        """Return the figures of a decode node for a prompt that a prefill node computes."""
        return DecodeFigures(
            node.room_for(entry.need.num_tails),
            node.num_units,
            node.max_running,
            node.is_full(now),
            node.routing_id == self._decode_sessions.node_of(entry.request.session),
            self._cached_share(node, entry, now),
            entry.request.group.handoff_s.mean,
            node.load.round_s,
        )

    def local(self, node: Node, entry: Entry, now: float) -> LocalFigures:
        """Return the figures of a decode node that would compute the prompt itself."""
        return LocalFigures(
            node.num_queued_tokens(now),
            self._num_uncached(node, entry, now),
            node.prompt_times,
            node.load.round_s,
            node.load.has_prompt_room,
            node.num_units,
            node.max_running,
            0 if node.is_full(now) else node.room_for(entry.need.num_tails),
            entry.need.local_pages,
            entry.request.group.errors["local"].factor(now),
            self._decode_sessions.node_of(entry.request.session) == node.routing_id,
        )

    def remote(self, node: Node, decode: Node | None, entry: Entry, now: float) -> RemoteFigures:
        """Return the figures of a prefill node. If `decode` is None, it answers alone."""
        return RemoteFigures(
            node.num_queued_tokens(now),
            self._num_uncached(node, entry, now),
            node.prompt_times,
            0.0 if decode is None else entry.request.group.handoff_s.mean,
            0.0 if decode is None else decode.load.round_s,
            entry.request.group.errors["remote"].factor(now),
            node.num_prompts,
        )

    def follows_session(self, prefill: Node, entry: Entry) -> bool:
        """Whether a prefill node served the session of the entry last."""
        return self._prefill_sessions.node_of(entry.request.session) == prefill.routing_id

    def _num_uncached(self, node: Node, entry: Entry, now: float) -> int:
        """Return how many prompt tokens the node has to compute, as far as is known: all, if it scores them."""
        request = entry.request
        if request.needs_prompt_logprobs:
            return len(request.prompt_ids)
        return len(request.prompt_ids) - self._num_cached_pages(node, entry, now) * request.group.page_size

    def _num_cached_pages(self, node: Node, entry: Entry, now: float) -> int:
        """Return how many leading pages of a prompt the node has or will have cached, as far as is known."""
        num_pages, state = 0, node.cache.state(now)
        if state == "whole":
            num_pages = node.cache.num_matched(entry.names, entry.request.group.num_tails)
        if state != "late":
            expected = self._expected.num_matched(node.routing_id, entry.names, _expected_since(node, now))
            num_pages = max(num_pages, expected)
        return num_pages

    def _cached_share(self, decode: Node, entry: Entry, now: float) -> float:
        """Return the share of a prompt whose pages need not travel to a decode node."""
        if decode.cache.state(now) != "whole":
            return 0.0
        num_pages = decode.cache.num_matched(entry.names, 0)
        return num_pages * entry.request.group.page_size / len(entry.request.prompt_ids)


def _expected_since(node: Node, now: float) -> float:
    """Return since when a node was given the pages that it has not told yet."""
    return min(now - EXPECTED_S, node.oldest_prompt_at(now))


def cached_words(node: Node, entry: Entry, num_uncached: int, now: float) -> str:
    """Return how much of a prompt its node has already, "" if nothing."""
    state, prompt_len = node.cache.state(now), len(entry.request.prompt_ids)
    if state == "late":
        return "; its news of cached pages is late, so load alone counts"
    if num_uncached >= prompt_len:
        return ""
    holds = "it holds" if state == "whole" else "it probably holds"
    return f"; {holds} {prompt_len - num_uncached:,} of the prompt's {prompt_len:,} tokens in its prefix cache"
