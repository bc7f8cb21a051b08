"""Node choice compares decode nodes, and prefill nodes, for a prompt that a prefill node must compute.

The functions `choose_...` are pure. The functions `..._reason` say in words why a node was chosen, from the figures
that were compared, and return "" if there was only one node to choose from. If either role may compute the prompt,
prompt_placement.py compares the nodes. The figures include which node served a session last (`SessionAffinity`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..nodes.node import Role
from .prompt_placement import LOAD_ROUNDS, SESSION_SLACK, load_reason, tokens_reason

MAX_SESSIONS = 32768  # remembered per role


class DecodeFigures(NamedTuple):
    """Figures by which `choose_decode` compares decode nodes."""

    room: int  # free pages of its largest pool, without those of reservations under way
    num_running: int  # with reservations under way
    max_running: int
    is_full: bool  # it refused, and has not shown more room since
    is_sessions: bool = False  # it served the request's session last
    cached_share: float = 0.0  # of the prompt, in its prefix cache
    handoff_s: float = 0.0  # of a prompt, in the mean; 0: unknown
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


class PrefillFigures(NamedTuple):
    """Figures by which `choose_prefill` compares prefill nodes."""

    queued_tokens: int  # prompt tokens still to compute
    num_queued: int
    max_queued: int
    cached_tokens: int  # of this prompt, in its prefix cache
    is_sessions: bool = False  # it served the request's session last


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


def choose_prefill(figures: Sequence[PrefillFigures], prompt_len: int) -> int | None:
    """Return the index of the node with the fewest tokens to compute up to this prompt's end, None if all are full. The
    node of the session counts as if it had the whole prompt in its cache."""
    return min(
        (index for index, node in enumerate(figures) if node.num_queued < node.max_queued),
        key=lambda index: (_tokens_to_end(figures[index], prompt_len), figures[index].num_queued),
        default=None,
    )


def prefill_reason(figures: Sequence[PrefillFigures], prompt_len: int, index: int) -> str:
    """Return why `choose_prefill` returned this index, "" if no other node takes prompts."""
    chosen = figures[index]
    others = [each for number, each in enumerate(figures) if number != index and each.num_queued < each.max_queued]
    if not others:
        return ""
    fewest = min(_tokens_to_end(each, prompt_len) for each in others)
    num_tokens = _tokens_to_end(chosen._replace(is_sessions=False), prompt_len)
    if chosen.is_sessions and num_tokens >= fewest:
        return (
            f"the session stays with its prefill node: {chosen.queued_tokens:,} tokens to compute before this prompt, "
            f"elsewhere at least {fewest:,} up to its end"
        )
    tied = [each.num_queued for each in others if _tokens_to_end(each, prompt_len) == num_tokens]
    prompts = f", and it has the fewest prompts: {chosen.num_queued}" if tied and chosen.num_queued < min(tied) else ""
    return tokens_reason(num_tokens, [_tokens_to_end(each, prompt_len) for each in others]) + prompts


def _tokens_to_end(node: PrefillFigures, prompt_len: int) -> int:
    return node.queued_tokens + (0 if node.is_sessions else prompt_len - node.cached_tokens)


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
