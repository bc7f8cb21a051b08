"""Prompt placement compares the nodes that could compute the prompt of a request, if either role may.

`place_sooner` is a pure function. It compares the times to the first two tokens of the output: a client waits for the
first one, and from the second one on it sees a stream flow. A handoff lies between them. nodes/prompt_role.py decides
when one role must compute the prompts of a group. `baton explain` shows the reason, and `/metrics` counts it.

The functions `..._reason` say in words why a node was chosen, from the figures that were compared. They return "" if
there was only one node to choose from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..nodes.prompt_role import PromptPlace, PromptTimes, in_ms

BUSY_STREAMS = 160  # on a node with so many, one second of waiting of a stream costs one second (`stall_s`)
SESSION_SLACK = 0.1  # of its places: so much fuller may the decode node of a session be
LOAD_ROUNDS = 4  # of delay that count for each sequence that a decode node has more than the least loaded one


class RemoteFigures(NamedTuple):
    """Figures of a prefill node, and of the handoff, on which the time of a remote prompt depends."""

    num_queued_tokens: int  # of the prompts before this one
    num_uncached_tokens: int  # of this prompt
    times: PromptTimes
    handoff_s: float  # from the end of the prompt to the second token, without one round; 0: unknown
    round_s: float  # of the decode node that would generate; 0: unknown
    error: float = 1.0  # estimates are multiplied by it (`EstimateError`)
    num_prompts: int = 0  # that it has not finished
    is_sessions: bool = False  # it served the request's session last

    @property
    def num_tokens(self) -> int:
        """The tokens to compute up to the end of this prompt."""
        return self.num_queued_tokens + self.num_uncached_tokens

    @property
    def counted(self) -> RemoteFigures:
        """The figures that are compared: the node of the session counts as if it had the whole prompt in its cache."""
        return self._replace(num_uncached_tokens=0) if self.is_sessions else self

    @property
    def two_tokens_s(self) -> float:
        """The mean of the seconds from now to the first and to the second token. An unknown handoff counts as free, so
        it is tried and measured."""
        return self.error * (self.times.seconds(self.num_tokens) + (self.handoff_s + self.round_s) / 2)


class LocalFigures(NamedTuple):
    """Figures of a decode node on which the time of a local prompt depends."""

    num_queued_tokens: int  # of the local prompts before this one
    num_uncached_tokens: int  # of this prompt
    times: PromptTimes  # beside its streams, in chunks within its bound on gaps
    round_s: float  # 0: unknown
    has_room: bool  # its bound on gaps leaves room for a chunk beside its streams
    num_running: int  # sequences that it holds or was asked for
    max_running: int
    room: int  # free pages of its largest pool, without those of reservations under way
    num_pages: int  # that the request needs there
    error: float = 1.0  # estimates are multiplied by it (`EstimateError`)
    is_sessions: bool = False  # it served the request's session last

    @property
    def share(self) -> float:
        """The load: the share of the sequences that it can run. The session's node may be fuller by SESSION_SLACK."""
        return (self.num_running / self.max_running if self.max_running else 1.0) - SESSION_SLACK * self.is_sessions

    @property
    def is_ready(self) -> bool:
        """Whether it has measured its times and has room for a chunk beside its streams."""
        return self.times.are_known and self.has_room

    @property
    def is_full(self) -> bool:
        """Whether it cannot take the sequence now."""
        return self.num_running >= self.max_running or self.room < self.num_pages

    @property
    def two_tokens_s(self) -> float:
        """The mean of the seconds from now to the first and to the second token. The first two rounds bring them."""
        num_tokens = self.num_queued_tokens + self.num_uncached_tokens
        return self.error * (self.times.seconds(num_tokens) + 1.5 * self.round_s)

    @property
    def load_s(self) -> float:
        """Return the price of its sequences, in seconds until the first two tokens."""
        return LOAD_ROUNDS * self.num_running * self.round_s

    @property
    def cost_s(self) -> float:
        """Return the seconds until the first two tokens and the price of its sequences. The node of the session counts
        as if it had the whole prompt in its cache."""
        if not self.is_sessions:
            return self.two_tokens_s + self.load_s
        num_free = min(self.num_running, SESSION_SLACK * self.max_running)
        cached_s = self._replace(num_uncached_tokens=0).two_tokens_s
        return cached_s + self.load_s - LOAD_ROUNDS * num_free * self.round_s

    def stall_s(self, token_s: float) -> float:
        """Return what the delay of this node's streams by the chunks of this prompt counts, in seconds to add to
        `two_tokens_s`. It rises with their number, since rounds are slower then. A token of the prompt counts at most
        `token_s`, without the rounds beside it."""
        waiting_s = self.num_running * self.num_uncached_tokens * min(token_s, self.times.token_s)
        return self.num_running / BUSY_STREAMS * waiting_s


class SoonerPlace(NamedTuple):
    """The choice of `place_sooner`. `node_index`: of the node that computes the prompt, in its role's list; None if no
    node takes it now."""

    place: PromptPlace
    node_index: int | None


def place_sooner(remotes: Sequence[RemoteFigures], locals_: Sequence[LocalFigures]) -> SoonerPlace:
    """Return the role and the node with the earliest first two tokens; a prefill node if equal.

    `remotes`: prefill nodes that take the prompt now. `locals_`: decode nodes that compute prompts. Of these the one
    counts that `choose_local` returns. A prefill node also gets the prompt if that decode node would be sooner by less
    than its streams' waiting counts.

    Nodes measure chunks before they join. Until a node has told its times, prompts are remote. A handoff that was never
    measured counts as free, so it is tried."""
    able = [each for each in locals_ if not each.is_full]
    remote, local = choose_remote(remotes), choose_local(locals_)
    chosen = None if local is None else locals_[local]
    if chosen is not None and not chosen.is_ready:
        chosen = None
    local_s = None if chosen is None else chosen.two_tokens_s
    if remote is None:
        if chosen is not None:
            return SoonerPlace(PromptPlace("local", "prefill nodes full", None, local_s, chosen.error), local)
        return SoonerPlace(PromptPlace("remote", "prefill nodes full"), None)
    if not able:
        return SoonerPlace(PromptPlace("remote", "decode nodes full" if locals_ else "no ready decode node"), remote)
    if not any(each.has_room for each in able):
        return SoonerPlace(PromptPlace("remote", "no room in the gap bound"), remote)
    if chosen is None or not all(each.times.are_known for each in remotes):
        return SoonerPlace(PromptPlace("remote", "not measured"), remote)
    remote_s, error = remotes[remote].two_tokens_s, remotes[remote].error
    if chosen.two_tokens_s >= remote_s:
        return SoonerPlace(PromptPlace("remote", "sooner", remote_s, local_s, error), remote)
    if chosen.two_tokens_s + chosen.stall_s(min(each.times.token_s for each in remotes)) >= remote_s:
        return SoonerPlace(PromptPlace("remote", "streams would wait", remote_s, local_s, error), remote)
    return SoonerPlace(PromptPlace("local", "sooner", remote_s, local_s, chosen.error), local)


def choose_remote(figures: Sequence[RemoteFigures]) -> int | None:
    """Return the index of the prefill node with the earliest first two tokens, None if the list is empty.

    While a node has not told its times, the fewest tokens up to the end of this prompt count. If these are equal, such
    a node comes first, so that it is measured, and then the one with the fewest prompts."""
    are_known = all(each.times.are_known for each in figures)
    counted = [each.counted for each in figures]
    return min(
        range(len(figures)),
        key=lambda index: (
            counted[index].two_tokens_s if are_known else counted[index].num_tokens,
            figures[index].times.are_known,
            figures[index].num_prompts,
        ),
        default=None,
    )


def remote_reason(figures: Sequence[RemoteFigures], index: int) -> str:
    """Return why `choose_remote` returned this index."""
    chosen, others = figures[index], [each.counted for each in (*figures[:index], *figures[index + 1 :])]
    if not others:
        return ""
    if not all(each.times.are_known for each in figures):
        fewest = min(each.num_tokens for each in others)
        if chosen.is_sessions and chosen.num_tokens >= fewest:
            return (
                f"the session stays with its prefill node: {chosen.num_queued_tokens:,} tokens to compute before this "
                f"prompt, elsewhere at least {fewest:,} up to its end"
            )
        is_untried = not chosen.times.are_known and any(
            each.times.are_known and each.num_tokens == chosen.num_tokens for each in others
        )
        tried = ", and its times are not measured yet" if is_untried else ""
        tied = [each.num_prompts for each in others if each.num_tokens == chosen.num_tokens]
        prompts = f", and it has the fewest prompts: {chosen.num_prompts}"
        has_fewest = not tried and tied and chosen.num_prompts < min(tied)
        words = _tokens_reason(chosen.num_tokens, [each.num_tokens for each in others])
        return words + tried + (prompts if has_fewest else "")
    own_s, next_s = chosen.two_tokens_s, min(each.two_tokens_s for each in others)
    own = f"{in_ms(own_s)} with {chosen.num_tokens:,} tokens to compute"
    if chosen.is_sessions and own_s >= next_s:
        return f"the session stays with its prefill node: the first two tokens in {own}, elsewhere in {in_ms(next_s)}"
    if own_s < next_s:
        words = f"of {len(figures)} prefill nodes it brings the first two tokens first"
        return f"{words}: in {own}, the next in {in_ms(next_s)}"
    return f"none of {len(figures)} prefill nodes brings the first two tokens sooner: in {own}"


def _tokens_reason(num_tokens: int, others: Sequence[int]) -> str:
    """Return why a prefill node was chosen by its tokens to compute up to the end of the prompt."""
    num_nodes, fewest = len(others) + 1, min(others)
    if num_tokens < fewest:
        return (
            f"of {num_nodes} prefill nodes it has the fewest tokens to compute up to the prompt's end: {num_tokens:,}, "
            f"the next {fewest:,}"
        )
    return f"none of {num_nodes} prefill nodes has fewer tokens to compute up to the prompt's end: {num_tokens:,}"


def choose_local(figures: Sequence[LocalFigures]) -> int | None:
    """Return the index of the best decode node for a local prompt. None: all nodes are full.

    Nodes come first that have told their times and have room within their bound on gaps. Among these, the node with the
    smallest sum wins (`cost_s`): the seconds until the first two tokens, plus a price for each sequence that the node
    holds. The price is there because a sequence runs for much longer than its prompt is computed. Without it, a
    short queue, or a prefix that all requests share, would bring all prompts to one node. A long history in a node's
    prefix cache still outweighs a few sequences."""
    able = [(index, each) for index, each in enumerate(figures) if not each.is_full]
    return min(
        able,
        key=lambda each: (
            not each[1].is_ready,
            not each[1].times.are_known,
            each[1].cost_s if each[1].times.are_known else 0.0,
            each[1].share,
            -each[1].room,
        ),
        default=(None, None),
    )[0]


def local_reason(figures: Sequence[LocalFigures], index: int) -> str:
    """Return why `choose_local` returned this index."""
    chosen = figures[index]
    others = [each for number, each in enumerate(figures) if number != index and not each.is_full]
    peers = [
        each for each in others if each.is_ready == chosen.is_ready and each.times.are_known == chosen.times.are_known
    ]
    if not others:
        return ""
    if not peers:
        room = " and room for a prompt beside its streams" if chosen.is_ready else ""
        return f"the only one of {len(others) + 1} decode nodes that has measured times{room}"
    if not chosen.times.are_known:
        return load_reason(chosen, peers)
    least_s = min(each.cost_s for each in peers)
    if chosen.cost_s >= least_s:
        return load_reason(chosen, [each for each in peers if each.cost_s == least_s])
    own_s = chosen.two_tokens_s + chosen.load_s
    load = f"{in_ms(chosen.load_s)} for its {chosen.num_running} running"
    cost = f"{in_ms(chosen.two_tokens_s)} to the first two tokens and {load}"
    if own_s >= least_s:
        return f"the session stays with its decode node: {cost}, elsewhere at least {in_ms(least_s)} in all"
    return f"of {len(peers) + 1} decode nodes it costs least: {cost}, elsewhere at least {in_ms(least_s)} in all"


class Loaded(Protocol):
    """Figures of the load of a decode node."""

    @property
    def num_running(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def room(self) -> int: ...
    @property
    def is_sessions(self) -> bool: ...


def load_reason(chosen: Loaded, others: Sequence[Loaded]) -> str:
    """Return why a decode node was chosen by its load, and by its free pages if loads are equal."""
    load, num_nodes = f"{chosen.num_running} running of {chosen.max_running}", len(others) + 1
    own, least = _load(chosen), min(others, key=_load)
    if chosen.is_sessions and own >= _load(least):
        return f"the session stays with its decode node: {load}, elsewhere {least.num_running} of {least.max_running}"
    if own < _load(least):
        return f"least loaded of {num_nodes} decode nodes: {load}"
    if chosen.room > max(each.room for each in others if _load(each) == own):
        return f"of the least loaded of {num_nodes} decode nodes ({load}) it has the most free pages: {chosen.room:,}"
    return f"none of {num_nodes} decode nodes is less loaded: {load}"


def _load(node: Loaded) -> float:
    return node.num_running / node.max_running
