"""Health of pairs: an automaton, without clock or socket, that decides which (prefill, decode) pairs may get requests,
and which decode nodes may get local prompts.

The dispatcher reports events with their time, and carries out the effects that come back, in order: StartCanary,
GiveUpCanary, PairsReady. Every canary that it starts ends with one event: `answered`, `failed` or `no_room`.

    untried ----- a canary's answer ------------> ready, unconfirmed, undecided or faulty, as the ballot decides
    any state --- a canary or transfer failed --> failed, until the answer of a later canary; then the ballot decides

A pair gets a canary when it is new, after a failure, and when it has served no request for `interval_s`. The answer is
a vote in the ballot of the pair's group (ballot.py). The ballot also names nodes that must compute the prompt alone;
they get canaries of their own. An untried pair gets requests if each of its nodes is in a pair that is ready. Neither
nodes without room nor clients that end their requests count against a pair.

If decode nodes of a group compute prompts, each of them is judged like a pair: by canaries that it computes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from ...metadata.wire.messages import Compute
from ..nodes.node import GroupKey, Node, NodeGroup
from ..placement.availability import drain_summary, missing_for_service
from ..requests.request import Request
from ..waiting.queue import Pinned
from .ballot import UNTRIED, Ballot, Verdict, Voter
from .canary import Canary, canary_prompt, canary_prompt_len

logger = logging.getLogger(__name__)

RETRY_S = 2.0  # from the start of a canary to the next one of the same pair
FULL_RETRY_S = 0.5  # until nodes that had no room for a canary are asked again
TIMEOUT_S = 30.0  # a canary is given up after so long without an answer, while none of its nodes computes
MAX_TIMEOUT_S = 300.0  # and after so long at the latest, since a message may be lost while its nodes compute for others
MAX_RETRY_S = 64.0  # longest wait for a canary after transfers that failed in a row
# Log-probabilities closer than this are a tie. In bfloat16 logits from 16 on are 0.125 apart, from 32 on 0.25.
TIE_GAP = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}
COARSE_TIE_GAP = 3.0  # for nodes that round coarsely; up to 2.0 was seen with small random models


class StartCanary(NamedTuple):
    """Send this request to these nodes now, outside the waiting queue. Report `no_room` if they cannot take it."""

    request: Request
    nodes: Pinned


class GiveUpCanary(NamedTuple):
    """End this request with an error for this reason, unless it is over."""

    request: Request
    reason: str


class PairsReady(NamedTuple):
    """A pair of the group became ready: requests that wait for nodes may get some."""

    group: NodeGroup


Effect = StartCanary | GiveUpCanary | PairsReady


class _Pair:
    """State of one pair, or of a decode node that computes prompts."""

    __slots__ = (
        "canary",
        "failure",
        "is_doubted",
        "num_failed_transfers",
        "retry_at",
        "verdict",
        "was_full",
        "worked_at",
    )

    def __init__(self) -> None:
        self.worked_at: float | None = None  # when the last request or canary went through it
        self.retry_at = 0.0  # no canary before
        self.failure: str | None = None  # why its last canary got no answer, or why a transfer failed
        self.verdict: Verdict = UNTRIED
        self.canary: Canary | None = None  # under way
        self.was_full = False  # its nodes had no room for the last canary
        self.is_doubted = False  # a request failed on it, so that a canary is due
        self.num_failed_transfers = 0  # of requests, since the pages of one arrived


class _Vote:
    """A group's ballot, the prompt that the vote is on, and the nodes that compute it alone now."""

    def __init__(self, group: NodeGroup) -> None:
        self.group = group
        self.prompt_ids = canary_prompt(group)
        self.is_coarse = group.rounds_coarsely
        self.ballot = Ballot(COARSE_TIE_GAP if self.is_coarse else TIE_GAP[group.layout.target.dtype])
        self.alone: dict[Voter, Canary] = {}
        self.full_until: dict[Voter, float] = {}  # nodes that had no room are not asked before

    @property
    def is_current(self) -> bool:
        """Whether prompt and ties are right for the nodes that the group has now."""
        has_room = len(self.prompt_ids) <= canary_prompt_len(self.group)
        return has_room and (self.is_coarse or not self.group.rounds_coarsely)

    def join(self, node: Node) -> None:
        """Let a node take part. Nothing happens if it does already."""
        self.ballot.joined(voter_of(node), can_compute=node.role == "prefill" or node.knows(Compute))

    def node(self, voter: Voter) -> Node | None:
        """Return the voter's node, None if it takes no canaries now."""
        nodes = (node for node in self.group.nodes.values() if node.unit_key == voter.key)
        return next((node for node in nodes if node.is_reachable and not node.is_draining), None)


class _PairRun(NamedTuple):
    """A canary on a pair."""

    canary: Canary
    vote: _Vote
    pair: _Pair
    prefill: Node
    decode: Node


class _LocalRun(NamedTuple):
    """A canary on a decode node that computes prompts."""

    canary: Canary
    vote: _Vote
    pair: _Pair
    decode: Node


class _SoloRun(NamedTuple):
    """A canary on one node alone, for the ballot."""

    canary: Canary
    vote: _Vote
    voter: Voter


class PairHealth:
    """States of all pairs, and the canaries under way. `groups` is a view of the registry's groups."""

    def __init__(self, groups: Mapping[GroupKey, NodeGroup], interval_s: float) -> None:
        self._groups = groups
        self._interval_s = interval_s
        self._pairs: dict[tuple[bytes, bytes], _Pair] = {}  # by `unit_key`
        self._locals: dict[bytes, _Pair] = {}  # decode nodes that compute prompts, by `unit_key`
        self._votes: dict[NodeGroup, _Vote] = {}
        self._runs: dict[str, _PairRun | _LocalRun | _SoloRun] = {}  # by the rid of the canary's request under way
        self._proven: set[bytes] = set()  # `unit_key` of the nodes in pairs that are ready

    @property
    def is_ready(self) -> bool:
        """Whether a pair that takes new requests is ready, or a decode node that takes local prompts."""
        groups = self._groups.values()
        return any(self.state(*nodes) == "ready" for group in groups for nodes in group.pairs()) or any(
            self.is_usable_alone(node) for group in groups for node in group.local_nodes()
        )

    @property
    def reason(self) -> str:
        """Why no pair is ready, for operators."""
        groups = list(self._groups.values())
        states = [self.state(*nodes) for group in groups for nodes in group.pairs()]
        states += [self.state_alone(node) for group in groups for node in group.local_nodes()]
        failures = [state for state in states if state not in ("ready", "untried")]
        words = [
            failures[0] if failures else missing_for_service(groups),
            drain_summary(node for group in groups for node in group.nodes.values()),
        ]
        return "; ".join(filter(None, words)) or "no canary request has passed yet"

    def why_unusable(self, group: NodeGroup) -> str:
        """Return why no pair of the group may get requests, for operators."""
        states = [self.state(*nodes) for nodes in group.pairs() if not self.is_usable(*nodes)]
        states += [self.state_alone(node) for node in group.local_nodes() if not self.is_usable_alone(node)]
        if not states:
            return "its nodes know no common protocol version"
        return next((state for state in states if state != "untried"), "no canary request has passed yet")

    def state(self, prefill: Node, decode: Node) -> str:
        """Return a pair's state: "ready", "untried", or a sentence on what is wrong with it."""
        pair = self._pairs.get(_key(prefill, decode))
        if pair is None:
            return "untried"
        fault = _fault(f"pair {_name(prefill, decode)}", pair)
        if fault:
            return fault
        return "ready" if pair.worked_at is not None and self.is_usable(prefill, decode) else "untried"

    def is_usable(self, prefill: Node, decode: Node) -> bool:
        """Return whether the pair may get requests: it is ready, or untried with both nodes proven in other pairs."""
        if not prefill.shares_protocol(decode.hello):
            return False
        pair = self._pairs.get(_key(prefill, decode))
        if pair is None or (pair.failure is None and pair.verdict.state == "untried"):
            return prefill.unit_key in self._proven and decode.unit_key in self._proven
        return pair.failure is None and pair.verdict.state == "ready"

    def state_alone(self, decode: Node) -> str:
        """Return the state of a decode node that computes prompts: "ready", "untried", or what is wrong with it."""
        pair = self._locals.get(decode.unit_key)
        return "untried" if pair is None else _fault(f"decode node {decode.node_id} alone", pair) or pair.verdict.state

    def is_usable_alone(self, decode: Node) -> bool:
        """Return whether a decode node may get local prompts."""
        return self.state_alone(decode) == "ready"

    def may_answer_alone(self, prefill: Node) -> bool:
        """Return whether a prefill node may answer requests for one token, which no decode node takes part in.

        It may unless one of its pairs is faulty or undecided and none is ready.
        """
        if prefill.unit_key in self._proven:
            return True
        verdicts = (pair.verdict.state for key, pair in self._pairs.items() if key[0] == prefill.unit_key)
        return not any(state in ("faulty", "undecided") for state in verdicts)

    def worked(self, prefill: Node, decode: Node, now: float) -> None:
        """Record that a request's pages arrived at the decode node."""
        pair = self._pairs.get(_key(prefill, decode))
        if pair is not None:
            pair.worked_at, pair.num_failed_transfers = now, 0

    def hands_over(self, group: NodeGroup) -> bool:
        """Return whether a pair of the group is not known to fail in handing pages over."""
        pairs = [self._pairs.get(_key(*nodes)) for nodes in group.pairs()]
        return not pairs or any(pair is None or pair.failure is None for pair in pairs)

    def worked_alone(self, decode: Node, now: float) -> None:
        """Record that a decode node computed a local prompt."""
        pair = self._locals.get(decode.unit_key)
        if pair is not None:
            pair.worked_at = now

    def doubt_alone(self, decode: Node) -> None:
        """Record that a request with a local prompt failed on a decode node, so that a canary is due."""
        pair = self._locals.get(decode.unit_key)
        if pair is not None:
            pair.is_doubted = True

    def doubt(self, prefill: Node, decode: Node, failure: str | None, now: float) -> None:
        """Record that a request failed on the pair, so that a canary is due although requests went through it lately.

        If a transfer between the two nodes failed, `failure` says why, and the pair gets no requests before a canary
        has passed. The canary is due at once after the first such failure, and later after each further one in a row: a
        network may let the few pages of a canary through, and not those of requests.
        """
        pair = self._pairs.get(_key(prefill, decode))
        if pair is None:
            return
        pair.is_doubted = True
        if failure is not None and pair.failure is None:
            name = _name(prefill, decode)
            logger.warning("pair %s is taken out of service until a canary passes: %s", name, failure)
            pair.failure = f"pair {name}: {failure}"
            back_off_s = RETRY_S * 2 ** min(pair.num_failed_transfers - 1, 16) if pair.num_failed_transfers else 0.0
            pair.num_failed_transfers += 1
            pair.retry_at = now + min(back_off_s, MAX_RETRY_S)

    def forget(self, node: Node) -> None:
        """Remove a node that is gone, with its pairs and its votes."""
        for key in [key for key in self._pairs if node.unit_key in key]:
            del self._pairs[key]
        self._locals.pop(node.unit_key, None)
        vote = self._votes.get(node.group)
        if vote is not None:
            vote.ballot.left(voter_of(node))
            self._recount(vote)

    def forget_group(self, group: NodeGroup) -> None:
        """Remove a group that is no more, with its ballot."""
        self._votes.pop(group, None)

    def look(self, now: float) -> list[Effect]:
        """Start the canaries that are due, and give up those without an answer. Call it several times per second."""
        effects: list[Effect] = []
        for group in self._groups.values():
            pairs, decodes = list(group.pairs()), group.local_nodes()
            if group.tokenizer is None or not (pairs or decodes):
                continue
            effects += self._renew_vote(group)
            vote = self._votes[group]
            for prefill, decode in pairs:
                vote.join(prefill)
                vote.join(decode)
                effects += self._look_at(vote, prefill, decode, now)
            for decode in decodes:
                vote.join(decode)
                effects += self._look_at_local(vote, decode, now)
            effects += self._ask_alone(vote, now)
        return effects

    def capacity_freed(self, now: float) -> list[Effect]:
        """Try the canaries again that found no room, because a decode node may have room now.

        Pairs that are ready need no hurry: they wait for their next turn.
        """
        judged = (*self._pairs.values(), *self._locals.values())
        full = [pair for pair in judged if pair.was_full and pair.verdict.state != "ready"]
        votes = [vote for vote in self._votes.values() if vote.full_until]
        for pair in full:
            pair.retry_at = 0.0
        for vote in votes:
            vote.full_until.clear()
        return self.look(now) if full or votes else []

    def answered(self, request: Request, now: float) -> list[Effect]:
        """A canary's request is done: count the answer, or ask for the next token."""
        match self._runs.pop(request.rid, None):
            case _PairRun(canary, vote, pair, prefill, decode):
                pair.canary = pair.failure = None
                pair.worked_at = now
                vote.ballot.canary(voter_of(prefill), voter_of(decode), canary.answer)
                return self._voted(vote, now)
            case _LocalRun(canary, vote, pair, decode):
                pair.canary = pair.failure = None
                pair.worked_at = now
                vote.ballot.own(voter_of(decode), canary.answer, now)
                return self._voted(vote, now)
            case _SoloRun(canary) as run if not canary.is_complete:
                return [self._start(run, now)]
            case _SoloRun(canary, vote, voter):
                del vote.alone[voter]
                logger.debug("%s alone computes the canary's %s", voter, canary.answer)
                vote.ballot.own(voter, canary.answer, now)
                return self._voted(vote, now)
            case None:
                return []

    def failed(self, request: Request, reason: str, now: float) -> list[Effect]:
        """A canary's request ended with an error."""
        match self._runs.pop(request.rid, None):
            case _PairRun(_, _, pair, prefill, decode):
                name = _name(prefill, decode)
                logger.error("pair %s: its canary failed: %s", name, reason)
                pair.canary, pair.failure = None, f"pair {name}: its canary failed: {reason}"
                return []
            case _LocalRun(_, _, pair, decode):
                logger.error("decode node %s alone: its canary failed: %s", decode.node_id, reason)
                pair.canary, pair.failure = None, f"decode node {decode.node_id} alone: its canary failed: {reason}"
                return []
            case _SoloRun(_, vote, voter):
                del vote.alone[voter]
                logger.error("%s could not compute a canary alone: %s", voter, reason)
                vote.ballot.unable(voter, reason, now)
                return self._voted(vote, now)
            case None:
                return []

    def no_room(self, request: Request, now: float) -> None:
        """The nodes of a canary have no room for it. That is no fault; the canary is tried again soon."""
        match self._runs.pop(request.rid, None):
            case _PairRun(_, _, pair) | _LocalRun(_, _, pair):
                pair.canary, pair.was_full, pair.retry_at = None, True, now + FULL_RETRY_S
            case _SoloRun(_, vote, voter):
                del vote.alone[voter]
                vote.full_until[voter] = now + FULL_RETRY_S
            case None:
                pass

    def _start(self, run: _PairRun | _LocalRun | _SoloRun, now: float) -> StartCanary:
        request = run.canary.next_request(now)
        self._runs[request.rid] = run
        return StartCanary(request, run.canary.nodes)

    def _renew_vote(self, group: NodeGroup) -> list[Effect]:
        """Begin the group's vote, or begin it again for a node that has joined: with a shorter prompt if it has no room
        for the old one, or with wider ties if it is the first that rounds coarsely."""
        old = self._votes.get(group)
        if old is not None and old.is_current:
            return []
        effects: list[Effect] = []
        for canary in old.alone.values() if old is not None else ():
            assert canary.request is not None, canary.nodes
            del self._runs[canary.request.rid]
            effects.append(GiveUpCanary(canary.request, "a node has joined that asks for another canary"))
        vote = self._votes[group] = _Vote(group)
        self._recount(vote)
        units = {node.unit_key for node in group.nodes.values()}
        for (prefill, _), pair in self._pairs.items():
            if prefill in units:
                pair.worked_at, pair.retry_at = None, 0.0
        for unit_key, local in self._locals.items():
            if unit_key in units:
                local.worked_at, local.retry_at = None, 0.0
        return effects

    def _look_at(self, vote: _Vote, prefill: Node, decode: Node, now: float) -> list[Effect]:
        pair = self._pairs.setdefault(_key(prefill, decode), _Pair())
        if pair.canary is not None:
            return _overdue(pair.canary, now)
        if not self._is_due(pair, self.is_usable(prefill, decode), now):
            return []
        pair.canary = Canary(vote.group, vote.prompt_ids, (prefill, decode))
        return [self._start(_PairRun(pair.canary, vote, pair, prefill, decode), now)]

    def _look_at_local(self, vote: _Vote, decode: Node, now: float) -> list[Effect]:
        pair = self._locals.get(decode.unit_key)
        if pair is None:  # what it computed alone before counts
            pair = self._locals[decode.unit_key] = _Pair()
            pair.verdict = vote.ballot.verdict_alone(voter_of(decode))
        if pair.canary is not None:
            return _overdue(pair.canary, now)
        if not self._is_due(pair, self.is_usable_alone(decode), now):
            return []
        pair.canary = Canary(vote.group, vote.prompt_ids, (None, decode))
        return [self._start(_LocalRun(pair.canary, vote, pair, decode), now)]

    def _is_due(self, pair: _Pair, is_usable: bool, now: float) -> bool:
        """Return whether a canary is due. If so, the caller starts one."""
        if now < pair.retry_at:
            return False
        has_worked_lately = pair.worked_at is not None and now - pair.worked_at < self._interval_s
        if has_worked_lately and pair.failure is None and is_usable and not pair.is_doubted:
            return False
        pair.retry_at = now + RETRY_S
        pair.is_doubted = pair.was_full = False
        return True

    def _ask_alone(self, vote: _Vote, now: float) -> list[Effect]:
        """Start canaries on the nodes that the ballot wants to hear alone, and give up those without an answer."""
        effects = [effect for canary in vote.alone.values() for effect in _overdue(canary, now)]
        for voter in vote.ballot.wanted(now):
            if voter in vote.alone or now < vote.full_until.get(voter, 0.0):
                continue
            node = vote.node(voter)
            if node is None:
                vote.ballot.unable(voter, "it takes no new work", now)
                effects += self._recount(vote)
                continue
            nodes: Pinned = (node, None) if voter.role == "prefill" else (None, node)
            canary = vote.alone[voter] = Canary(vote.group, vote.prompt_ids, nodes)
            effects.append(self._start(_SoloRun(canary, vote, voter), now))
        return effects

    def _voted(self, vote: _Vote, now: float) -> list[Effect]:
        """Follow up on a new answer. An answer to a prompt that another one replaced has no consequences."""
        if self._votes.get(vote.group) is not vote:
            return []
        return [*self._recount(vote), *self._ask_alone(vote, now)]

    def _recount(self, vote: _Vote) -> list[Effect]:
        """Take over the ballot's verdicts on the pairs of a group, and on decode nodes that compute prompts."""
        has_new = False
        for prefill in vote.group.nodes.values():
            for decode in vote.group.nodes.values():
                pair = self._pairs.get(_key(prefill, decode))
                if pair is None:
                    continue
                before, pair.verdict = pair.verdict, vote.ballot.verdict(voter_of(prefill), voter_of(decode))
                if before != pair.verdict:
                    has_new |= pair.verdict.state == "ready"
                    _log(f"pair {_name(prefill, decode)}", before, pair.verdict)
        for node in vote.group.nodes.values():
            local = self._locals.get(node.unit_key)
            if local is None:
                continue
            before, local.verdict = local.verdict, vote.ballot.verdict_alone(voter_of(node))
            if before != local.verdict:
                has_new |= local.verdict.state == "ready"
                _log(f"decode node {node.node_id} alone", before, local.verdict)
        ready = [key for key, pair in self._pairs.items() if pair.verdict.state == "ready"]
        self._proven = {unit_key for key in ready for unit_key in key}
        return [PairsReady(vote.group)] if has_new else []


def voter_of(node: Node) -> Voter:
    """Return the node as the ballot knows it."""
    return Voter(node.role, node.unit, node.unit_key)


def _overdue(canary: Canary, now: float) -> list[Effect]:
    """Give a canary up if its request has been under way for too long. Time in which one of its nodes is in a step does
    not count: prompts before the canary's may be long."""
    request = canary.request
    if request is None:
        return []
    idle_s, age_s = canary.wait(now), now - request.created_at
    if idle_s <= TIMEOUT_S and age_s <= MAX_TIMEOUT_S:
        return []
    return [GiveUpCanary(request, f"no answer within {TIMEOUT_S if idle_s > TIMEOUT_S else MAX_TIMEOUT_S:.0f} s")]


def _key(prefill: Node, decode: Node) -> tuple[bytes, bytes]:
    return prefill.unit_key, decode.unit_key


def _name(prefill: Node, decode: Node) -> str:
    return f"{prefill.unit} -> {decode.unit}"


def _fault(name: str, pair: _Pair) -> str:
    """Return a sentence on the fault of a pair or node; "" if none is known."""
    if pair.failure is not None:
        return pair.failure
    return f"{name} is {pair.verdict.state}: {pair.verdict.words}" if pair.verdict.words else ""


def _log(name: str, before: Verdict, after: Verdict) -> None:
    match after.state:
        case "ready":
            logger.info("%s is ready", name)
        case "faulty":
            logger.error("%s is faulty: %s", name, after.words)
        case "undecided" if before.state != "undecided":
            logger.warning("%s is undecided: %s", name, after.words)
        case _:
            logger.debug("%s is %s: %s", name, after.state, after.words)
