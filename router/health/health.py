"""Health of pairs: an automaton, without clock or socket, that decides which (prefill, decode) pairs may get requests,
and which decode nodes may get local prompts.

The dispatcher reports events with their time, and carries out the effects that come back, in order: StartCanary,
GiveUpCanary, PairsReady. Every canary that it starts ends with one event: `answered`, `failed` or `no_room`.

    untried ----- a canary's answer ------------> ready, unconfirmed, undecided or faulty, as the ballot decides
    any state --- a canary or transfer failed --> failed, until the answer of a later canary; then the ballot decides

A pair gets a canary when it is new, after a failure, and when it has served no request for `interval_s`. The ballot of
the pair's group (verdicts.py) judges the answer. It also names nodes that must compute the prompt alone; they get
canaries of their own. An untried pair gets requests if each of its nodes is in a pair that is ready. Neither nodes
without room nor clients that end their requests count against a pair.

If decode nodes of a group compute prompts, each of them is judged like a pair: by canaries that it computes alone.

Ranks of a rank group count as one node: a canary runs on any of them, and its answer is that of all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from ...metadata.wire.messages import Compute
from ..nodes.availability import drain_summary, missing_for_service
from ..nodes.node import GroupKey, Node, NodeGroup
from ..requests.request import Request
from ..waiting.queue import Pinned
from .canary import Canary, canary_prompt, canary_prompt_len
from .verdicts import UNTRIED, Ballot, Verdict, Voter, Voters

logger = logging.getLogger(__name__)

RETRY_S = 2.0  # from a canary that did not make its nodes ready to their next one
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
_Key = tuple[bytes | None, bytes | None]  # `unit_key` of a prefill and a decode node, None for the one left out


class _Subject:
    """The health of a pair, or of a node that computes alone: its canary under way, its verdict, its failures."""

    __slots__ = (
        "canary",
        "failure",
        "is_doubted",
        "nodes",
        "num_failed_transfers",
        "retry_at",
        "verdict",
        "was_full",
        "worked_at",
    )

    def __init__(self, nodes: Pinned) -> None:
        self.nodes = nodes
        self.worked_at: float | None = None  # when the last request or canary went through it
        self.retry_at = 0.0  # no canary before
        self.failure: str | None = None  # why its last canary got no answer, or why a transfer failed
        self.verdict: Verdict = UNTRIED
        self.canary: Canary | None = None  # under way
        self.was_full = False  # its nodes had no room for the last canary
        self.is_doubted = False  # a request failed on it, so that a canary is due
        self.num_failed_transfers = 0  # of requests, since the pages of one arrived

    @property
    def is_pair(self) -> bool:
        return None not in self.nodes

    @property
    def name(self) -> str:
        voters = self.voters
        return f"pair {voters[0].name} -> {voters[1].name}" if self.is_pair else f"{voters[0]} alone"

    @property
    def voters(self) -> Voters:
        """The nodes as the ballot knows them."""
        return tuple(voter_of(node) for node in self.nodes if node is not None)

    @property
    def is_ready(self) -> bool:
        return self.failure is None and self.verdict.state == "ready"

    @property
    def state(self) -> str:
        """The word ready or untried, or a sentence on what is wrong."""
        state, words = self.verdict
        return self.failure or (f"{self.name} is {state}: {words}" if words else state)


class _Vote:
    """A group's ballot, the prompt that the vote is on, and what the ballot judges. Made anew if a node joins that asks
    for another prompt: a shorter one if it has no room for this one, or wider ties if it is the first that rounds
    coarsely."""

    def __init__(self, group: NodeGroup) -> None:
        self.group = group
        self.prompt_ids = canary_prompt(group)
        self.is_coarse = group.rounds_coarsely
        self.ballot = Ballot(COARSE_TIE_GAP if self.is_coarse else TIE_GAP[group.layout.target.dtype])
        self.subjects: dict[_Key, _Subject] = {}
        self.proven: set[bytes | None] = set()  # `unit_key` of the nodes in pairs that are ready

    @property
    def is_current(self) -> bool:
        """Whether prompt and ties are right for the nodes that the group has now."""
        has_room = len(self.prompt_ids) <= canary_prompt_len(self.group)
        return has_room and (self.is_coarse or not self.group.rounds_coarsely)

    def subject(self, nodes: Pinned) -> _Subject:
        """Return what is known of these nodes, a new entry if nothing is. They take part in the vote from now on."""
        key = _key(*nodes)
        if key not in self.subjects:
            self.subjects[key] = _Subject(nodes)
            for node in nodes:
                if node is not None:
                    can_compute = node.role == "prefill" or node.knows(Compute)
                    self.ballot.joined(voter_of(node), can_compute=can_compute)
        return self.subjects[key]

    def may_answer_alone(self, prefill: Node) -> bool:
        """Return whether one of a prefill node's pairs is ready, or none is faulty or undecided."""
        pairs = (each for (key, _), each in self.subjects.items() if each.is_pair and key == prefill.unit_key)
        is_proven = prefill.unit_key in self.proven
        return is_proven or not any(pair.verdict.state in ("faulty", "undecided") for pair in pairs)

    def alone(self, voter: Voter) -> Pinned | None:
        """Return a voter's node as the nodes of a canary, None if it takes no canaries now."""
        ranks = (node for node in self.group.nodes.values() if node.unit_key == voter.key)
        node = next((rank for rank in ranks if rank.is_reachable and not rank.is_draining), None)
        if node is None:
            return None
        return (node, None) if node.role == "prefill" else (None, node)


class PairHealth:
    """States of all pairs, and the canaries under way. `groups` is a view of the registry's groups."""

    def __init__(self, groups: Mapping[GroupKey, NodeGroup], interval_s: float) -> None:
        self._groups = groups
        self._interval_s = interval_s
        self._votes: dict[NodeGroup, _Vote] = {}
        self._runs: dict[str, tuple[_Vote, _Subject]] = {}  # by the rid of the canary's request under way

    @property
    def is_ready(self) -> bool:
        """Whether a pair that takes new requests is ready, or a decode node that takes local prompts."""
        return any(self.state(*nodes) == "ready" for group in self._groups.values() for nodes in _serving(group))

    @property
    def reason(self) -> str:
        """Why no pair is ready, for operators."""
        groups = list(self._groups.values())
        states = [self.state(*nodes) for group in groups for nodes in _serving(group)]
        failures = [state for state in states if state not in ("ready", "untried")]
        words = [
            failures[0] if failures else missing_for_service(groups),
            drain_summary(node for group in groups for node in group.nodes.values()),
        ]
        return "; ".join(filter(None, words)) or "no canary request has passed yet"

    def why_unusable(self, group: NodeGroup) -> str:
        """Return why no pair of the group may get requests, for operators."""
        states = [self.state(*nodes) for nodes in _serving(group) if not self.is_usable(*nodes)]
        if not states:
            return "its nodes know no common protocol version"
        return next((state for state in states if state != "untried"), "no canary request has passed yet")

    def state(self, prefill: Node | None, decode: Node | None) -> str:
        """Return the state of a pair or of a node alone: "ready", "untried", or a sentence on what is wrong with it."""
        subject = self._find(prefill, decode)
        if subject is None:
            return "untried"
        has_worked = subject.is_pair and subject.worked_at is not None
        return (
            "ready" if subject.state == "untried" and has_worked and self.is_usable(prefill, decode) else subject.state
        )

    def is_usable(self, prefill: Node | None, decode: Node | None) -> bool:
        """Return whether a pair or a node alone may get requests.

        A pair may if it is ready, or untried with both nodes proven in other pairs. A decode node may get local prompts
        if it is ready. A prefill node may answer requests for one token unless one of its pairs is faulty or undecided
        and none is ready.
        """
        if decode is None:
            vote = self._votes.get(prefill.group) if prefill is not None else None
            return prefill is not None and (vote is None or vote.may_answer_alone(prefill))
        if prefill is not None and not prefill.shares_protocol(decode.hello):
            return False
        subject = self._find(prefill, decode)
        if subject is not None and (subject.is_ready or subject.state != "untried"):
            return subject.is_ready
        vote = self._votes.get(decode.group)
        return vote is not None and prefill is not None and vote.proven >= {prefill.unit_key, decode.unit_key}

    def hands_over(self, group: NodeGroup) -> bool:
        """Return whether a pair of the group is not known to fail in handing pages over."""
        pairs = [self._find(*nodes) for nodes in group.pairs()]
        return not pairs or any(pair is None or pair.failure is None for pair in pairs)

    def worked(self, prefill: Node | None, decode: Node, now: float) -> None:
        """Record that a request's pages arrived at the decode node, or that it computed a local prompt."""
        subject = self._find(prefill, decode)
        if subject is not None:
            subject.worked_at, subject.num_failed_transfers = now, 0

    def doubt(self, prefill: Node | None, decode: Node, failure: str | None, now: float) -> None:
        """Record that a request failed on a pair, or with a local prompt on a decode node. A canary is due although
        requests went through lately.

        If a transfer between the two nodes failed, `failure` says why, and the pair gets no requests before a canary
        has passed. The canary is due at once after the first such failure, and later after each further one in a row: a
        network may let the few pages of a canary through, and not those of requests.
        """
        subject = self._find(prefill, decode)
        if subject is None:
            return
        subject.is_doubted = True
        if failure is not None and subject.failure is None:
            logger.warning("%s is taken out of service until a canary passes: %s", subject.name, failure)
            subject.failure = f"{subject.name}: {failure}"
            num_before = subject.num_failed_transfers
            subject.num_failed_transfers += 1
            subject.retry_at = now + (min(RETRY_S * 2 ** min(num_before - 1, 16), MAX_RETRY_S) if num_before else 0.0)

    def forget(self, node: Node) -> None:
        """Remove a node that is gone, with its pairs, its votes and the canaries under way on it."""
        vote = self._votes.get(node.group)
        if vote is not None:
            for key in [key for key in vote.subjects if node.unit_key in key]:
                self._end_run(vote.subjects.pop(key))
            vote.ballot.left(voter_of(node))
            self._recount(vote)

    def forget_group(self, group: NodeGroup) -> None:
        """Remove a group that is no more, with its ballot."""
        vote = self._votes.pop(group, None)
        for subject in vote.subjects.values() if vote is not None else ():
            self._end_run(subject)

    def look(self, now: float) -> list[Effect]:
        """Start the canaries that are due, and give up those without an answer. Call it several times per second."""
        effects: list[Effect] = []
        for group in self._groups.values():
            served = _serving(group)
            if group.tokenizer is None or not served:
                continue
            effects += self._renew_vote(group)
            vote = self._votes[group]
            for subject in vote.subjects.values():
                effects += _overdue(subject.canary, now) if subject.canary is not None else []
            for nodes in served:
                if self._is_due(subject := vote.subject(nodes), now):
                    effects += self._begin(vote, subject, nodes, now)
            effects += self._ask_alone(vote, now)
        return effects

    def capacity_freed(self, now: float) -> list[Effect]:
        """Try the canaries again that found no room, because a decode node may have room now.

        Pairs that are ready need no hurry: they wait for their next turn.
        """
        subjects = [each for vote in self._votes.values() for each in vote.subjects.values()]
        full = [each for each in subjects if each.was_full and each.verdict.state != "ready"]
        for subject in full:
            subject.retry_at = 0.0
        return self.look(now) if full else []

    def answered(self, request: Request, now: float) -> list[Effect]:
        """A canary's request is done: count the answer, or ask for the next token."""
        if request.rid not in self._runs:
            return []
        vote, subject = self._runs.pop(request.rid)
        canary = subject.canary
        assert canary is not None, subject.name
        if not canary.is_complete:
            return [self._start(vote, subject, canary, now)]
        subject.canary = subject.failure = None
        subject.worked_at = now
        logger.debug("%s computes the canary's %s", subject.name, canary.answer)
        vote.ballot.take(subject.voters, canary.answer)
        return [*self._recount(vote), *self._ask_alone(vote, now)]

    def failed(self, request: Request, reason: str, now: float) -> list[Effect]:
        """A canary's request ended with an error."""
        if request.rid not in self._runs:
            return []
        vote, subject = self._runs.pop(request.rid)
        logger.error("%s: its canary failed: %s", subject.name, reason)
        subject.canary, subject.failure = None, f"{subject.name}: its canary failed: {reason}"
        subject.retry_at = max(subject.retry_at, now + RETRY_S)
        if subject.is_pair:
            return []
        vote.ballot.unable(subject.voters[0], reason)
        return [*self._recount(vote), *self._ask_alone(vote, now)]

    def no_room(self, request: Request, now: float) -> None:
        """The nodes of a canary have no room for it. That is no fault; the canary is tried again soon."""
        if request.rid in self._runs:
            _, subject = self._runs.pop(request.rid)
            subject.canary, subject.was_full, subject.retry_at = None, True, now + FULL_RETRY_S

    def _find(self, prefill: Node | None, decode: Node | None) -> _Subject | None:
        node = decode if prefill is None else prefill
        vote = self._votes.get(node.group) if node is not None else None
        return None if vote is None else vote.subjects.get(_key(prefill, decode))

    def _end_run(self, subject: _Subject) -> None:
        """Forget the canary of a subject that is no more."""
        if subject.canary is not None and subject.canary.request is not None:
            del self._runs[subject.canary.request.rid]

    def _start(self, vote: _Vote, subject: _Subject, canary: Canary, now: float) -> StartCanary:
        request = canary.next_request(now)
        self._runs[request.rid] = vote, subject
        return StartCanary(request, canary.nodes)

    def _renew_vote(self, group: NodeGroup) -> list[Effect]:
        """Begin the group's vote, or begin it again if it is not current."""
        old = self._votes.get(group)
        if old is not None and old.is_current:
            return []
        self.forget_group(group)
        self._votes[group] = _Vote(group)
        requests = [each.canary.request for each in old.subjects.values() if each.canary] if old is not None else []
        why = "a node has joined that asks for another canary"
        return [GiveUpCanary(request, why) for request in requests if request is not None]

    def _is_due(self, subject: _Subject, now: float) -> bool:
        """Return whether a pair, or a node that computes prompts, should get a canary now."""
        has_worked_lately = subject.worked_at is not None and now - subject.worked_at < self._interval_s
        return not has_worked_lately or subject.is_doubted or not self.is_usable(*subject.nodes)

    def _begin(self, vote: _Vote, subject: _Subject, nodes: Pinned, now: float) -> list[Effect]:
        """Start a canary on these nodes, unless one is under way or it is too early for the next one."""
        if subject.canary is not None or now < subject.retry_at:
            return []
        subject.retry_at = now + RETRY_S
        subject.is_doubted = subject.was_full = False
        subject.canary = Canary(vote.group, vote.prompt_ids, nodes)
        return [self._start(vote, subject, subject.canary, now)]

    def _ask_alone(self, vote: _Vote, now: float) -> list[Effect]:
        """Start canaries on the nodes that the ballot wants to hear alone."""
        effects: list[Effect] = []
        for voter in vote.ballot.wanted():
            nodes = vote.alone(voter)
            if nodes is None:
                vote.ballot.unable(voter, "it takes no new work")
            else:
                effects += self._begin(vote, vote.subject(nodes), nodes, now)
        return effects

    def _recount(self, vote: _Vote) -> list[Effect]:
        """Take over the ballot's verdicts. Those on nodes alone have consequences if the nodes compute prompts."""
        has_new = False
        local = {_key(None, node) for node in vote.group.local_nodes()}
        for key, subject in vote.subjects.items():
            before, subject.verdict = subject.verdict, vote.ballot.verdict(subject.voters)
            if before != subject.verdict and (subject.is_pair or key in local):
                has_new |= subject.verdict.state == "ready"
                _log(subject.name, before, subject.verdict)
        ready = [key for key, each in vote.subjects.items() if each.is_pair and each.verdict.state == "ready"]
        vote.proven = {unit_key for key in ready for unit_key in key}
        return [PairsReady(vote.group)] if has_new else []


def _serving(group: NodeGroup) -> list[Pinned]:
    """Return the pairs that take new work, and the decode nodes that compute prompts."""
    return [*group.pairs(), *((None, node) for node in group.local_nodes())]


def voter_of(node: Node) -> Voter:
    """Return the node as the ballot knows it."""
    return Voter(node.role, node.unit, node.unit_key)


def _key(prefill: Node | None, decode: Node | None) -> _Key:
    return None if prefill is None else prefill.unit_key, None if decode is None else decode.unit_key


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
