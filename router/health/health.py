"""Decides which nodes get requests. `PairHealth` has a state for each pair of a prefill and a decode node, and for each
decode node that computes prompts itself. It is an automaton: it has no clock and no socket.

The dispatcher reports events with their time, and carries out the effects that come back, in order: StartCanary,
PairsReady, TellProven, TellOutcome. Every canary that it starts ends with one event: `answered`, `failed` or `no_room`.

    untried ----- it and its nodes alone have answered --> ready, undecided or faulty, by the votes (verdicts.py)
    any state --- a canary or transfer failed -----------> failed, until the answer of a later canary

Each pair, and each node alone, gets a canary when it is new, while it is not ready, after a request failed on it, and
when it has served no request for `interval_s`. Pairs of a large group wait longer, in proportion to their number per
node, so that canaries and the work of `look` grow with the number of nodes alone. Neither nodes without room nor
clients that end their requests count against it. Ranks of a rank group count as one node: a canary runs on any of them,
and its answer is that of all.

If a node has several routers, one of them sends the routine canaries (canary.py). Each router counts the answers that
the others tell as its own ones. But what fails for one router may work for another one, whose network is another: only
its own canaries take nodes out of service, and back. A failure that is told makes it send one, as does a request that
failed here.

Nodes remember for the next router with which other nodes they are in pairs that are ready (TellProven), and their Hello
says so. If both nodes of a pair name each other, the pair begins as ready, as if it had served a request when the first
of them joined; and so does each of the two alone. What a node reports counts no more once this router has sent it a
canary, or has seen a request fail on it, and the node has left: what it remembers may be older than that.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...metadata.wire.membership import MAX_PROVEN, Proven
from ...metadata.wire.messages import Compute
from ...metadata.wire.node_info import CanaryOutcome
from ..nodes.availability import drain_summary, missing_for_service
from ..nodes.node import GroupKey, Node, NodeGroup
from ..requests.request import Request
from ..waiting.entry import Pinned
from .canary import AWAITED_S, Canary, Prompt, answer_told, is_of_another, nodes_of, outcome
from .verdicts import READY, UNTRIED, Answer, Verdict, Votes

logger = logging.getLogger(__name__)

RETRY_S = 2.0  # from a canary that did not make its nodes ready to their next one
FULL_RETRY_S = 0.5  # from a canary that found no room to its next one, unless a decode node says that it has room
MAX_RETRY_S = 64.0  # longest wait for a canary after transfers that failed in a row
PAIRS_PER_NODE = 4  # a group with more pairs per node is large: so many are looked at together
LARGE_RUNS = 64  # canaries under way, beyond which pairs of a large group wait for theirs
MAX_TESTED = 4096  # epochs of nodes that are gone, whose reports count no more


class StartCanary(NamedTuple):
    """Send this request to these nodes now, outside the waiting queue. Report `no_room` if they cannot take it."""

    request: Request
    nodes: Pinned


class PairsReady(NamedTuple):
    """A pair of the group became ready: requests that wait for nodes may get some."""

    group: NodeGroup


class TellProven(NamedTuple):
    """Tell the node the epochs of the nodes with which it is in pairs that are ready. Report `untold` if it fails."""

    node: Node
    epochs: tuple[str, ...]


class TellOutcome(NamedTuple):
    """Tell the node how a canary went, for its other routers."""

    node: Node
    outcome: CanaryOutcome


Effect = StartCanary | PairsReady | TellProven | TellOutcome
_Key = tuple[bytes | None, bytes | None]  # `unit_key` of a prefill and a decode node, None for the one left out


class _Subject:
    """The health of a pair, or of a node that computes alone."""

    def __init__(self, nodes: Pinned, now: float, on_change: Callable[[_Subject], None]) -> None:
        """`on_change` is called when verdict or failure changes."""
        self.nodes = nodes
        self._on_change = on_change
        self.told_at = now  # when another router's canary went through it, or it was new
        self.answer: Answer | None = None  # to its last canary that got one
        self._verdict: Verdict = UNTRIED
        self._failure: str | None = None
        self.canary: Canary | None = None  # under way
        self.worked_at = -math.inf  # when the last request or canary went through it
        self.retry_at = 0.0  # no canary before
        self.was_full = False  # its nodes had no room for the last canary
        self.is_doubted = False  # a request failed on it, or its answer is wanted: a canary is due
        self.was_doubted = False  # before its last canary
        self.num_failed_transfers = 0  # of requests, since the pages of one arrived

    @property
    def verdict(self) -> Verdict:
        return self._verdict

    @verdict.setter
    def verdict(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._on_change(self)

    @property
    def failure(self) -> str | None:
        """Why its last canary got no answer, or why a transfer failed."""
        return self._failure

    @failure.setter
    def failure(self, failure: str | None) -> None:
        if failure != self._failure:
            self._failure = failure
            self._on_change(self)

    @property
    def is_pair(self) -> bool:
        return None not in self.nodes

    @property
    def is_tested(self) -> bool:
        """Whether this router knows, or wants to know, more than what its nodes report."""
        return self.is_doubted or self.canary is not None or self.failure is not None or self.answer is not None

    @property
    def is_pending(self) -> bool:
        """Whether it has not answered yet, and takes canaries, none of which has failed or is late."""
        is_live = all(node is None or node.is_live for node in self.nodes)
        is_late = self.canary is not None and self.canary.is_late
        return self.answer is None and self.failure is None and is_live and not is_late

    @property
    def name(self) -> str:
        nodes = [node for node in self.nodes if node is not None]
        if self.is_pair:
            return f"pair {' -> '.join(node.unit for node in nodes)}"
        return f"{nodes[0].role} node {nodes[0].unit}"

    @property
    def is_ready(self) -> bool:
        return self._failure is None and self._verdict == READY

    @property
    def state(self) -> str:
        """The word ready or untried, or a sentence on what is wrong."""
        state, words = self.verdict
        return self.failure or (f"{self.name} is {state}: {words}" if words else state)

    def begin_as_ready(self, worked_at: float) -> None:
        """Take over what an earlier router found out, unless this one knows better."""
        if self.verdict == UNTRIED:
            self.verdict, self.worked_at = READY, worked_at


@dataclass(slots=True)
class _Partners:
    """The epochs of the nodes with which a node is in pairs that are ready."""

    epochs: set[str] = field(default_factory=set)
    told: tuple[str, ...] | None = None  # as `Proven` names them; None: they have changed


class _Vote:
    """A group's prompt, and all pairs and nodes alone that are tested with it. Made anew if a node joins that asks for
    another prompt. Reports of nodes whose epoch is in `tested` do not count."""

    def __init__(self, group: NodeGroup, tested: Collection[str]) -> None:
        self.group = group
        self._tested = tested
        self.prompt = Prompt(group)
        self.subjects: dict[_Key, _Subject] = {}
        self.num_taken_over = 0  # pairs that were ready as their nodes report
        self._of_unit: dict[bytes, dict[_Key, _Subject]] = {}  # the subjects of each `unit_key`
        self._odd: dict[_Subject, None] = {}  # undecided or faulty
        self._votes: Votes | None = None  # None: they must be counted anew
        self._judged_by: Votes | None = None  # the votes by which all subjects have their verdicts
        self._turn = 0  # number of the pair of a large group that is looked at next
        self._met: set[bytes] = set()  # nodes whose reports have been read, by routing id
        self._changed: dict[_Subject, None] = {}  # since `proven` was asked
        self._partners: defaultdict[bytes, _Partners] = defaultdict(_Partners)  # by `unit_key`

    def tested(self) -> list[Pinned]:
        """Return the pairs that take new work, and the nodes that do and can compute alone."""
        return [*self.group.pairs(), *self._alone(self.group.live("prefill"), self.group.live("decode"))]

    @property
    def pairs_per_look(self) -> float:
        """Number of pairs of a large group for each one that is looked at together with others; 1 if it is not
        large."""
        num_prefills, num_decodes = len(self.group.live("prefill")), len(self.group.live("decode"))
        return max(1.0, num_prefills * num_decodes / (PAIRS_PER_NODE * max(1, num_prefills + num_decodes)))

    def in_turn(self) -> list[Pinned]:
        """Return all that is tested; of a large group, all nodes alone and the pairs whose turn it is."""
        prefills, decodes = self.group.live("prefill"), self.group.live("decode")
        num_pairs, most = len(prefills) * len(decodes), PAIRS_PER_NODE * (len(prefills) + len(decodes))
        if num_pairs <= most:
            return self.tested()
        turns = range(self._turn, self._turn + most)
        self._turn = (self._turn + most) % num_pairs
        pairs = ((prefills[i // len(decodes) % len(prefills)], decodes[i % len(decodes)]) for i in turns)
        alone, reported = self._alone(prefills, decodes), self._newly_reported(prefills, decodes)
        return [*alone, *reported, *(pair for pair in pairs if pair[0].shares_protocol(pair[1]))]

    def _newly_reported(self, prefills: list[Node], decodes: list[Node]) -> Iterator[Pinned]:
        """Yield the pairs that nodes report which this was not asked for before: they are ready without a canary."""
        for nodes, partners in ((prefills, decodes), (decodes, prefills)):
            new = [node for node in nodes if node.routing_id not in self._met and self._report(node)]
            by_epoch = {node.unit_epoch: node for node in partners} if new else {}
            for node in new:
                self._met.add(node.routing_id)
                for other in filter(None, map(by_epoch.get, self._report(node))):
                    if node.shares_protocol(other):
                        yield (node, other) if node.role == "prefill" else (other, node)

    @staticmethod
    def _alone(prefills: list[Node], decodes: list[Node]) -> list[Pinned]:
        return [*((node, None) for node in prefills), *((None, node) for node in decodes if node.knows(Compute))]

    def subject(self, nodes: Pinned, now: float, interval_s: float) -> _Subject:
        """Return what is known of these nodes, a new entry if nothing is."""
        key = _key(*nodes)
        subject = self.subjects.get(key)
        if subject is None:
            subject = self.subjects[key] = _Subject(nodes, now, self._has_changed)
            for unit_key in filter(None, key):
                self._of_unit.setdefault(unit_key, {})[key] = subject
            prefill, decode = nodes
            if prefill is None or decode is None:
                self._votes = None
                if any(node is not None and self._report(node) for node in nodes):
                    subject.retry_at = now + RETRY_S  # until then its partners may join, and confirm what it says
            elif prefill.unit_epoch in self._report(decode) and decode.unit_epoch in self._report(prefill):
                joined_at = min(prefill.joined_at, decode.joined_at)
                alone: list[Pinned] = [(prefill, None), (None, decode)]
                if now - joined_at < interval_s:
                    for each in (subject, *(self.subject(node, now, interval_s) for node in alone)):
                        each.begin_as_ready(joined_at)
                    self.num_taken_over += 1
                    logger.debug("%s is ready, as both nodes report", subject.name)
        return subject

    def _report(self, node: Node) -> tuple[str, ...]:
        return () if node.unit_epoch in self._tested else node.hello.proven

    def forget(self, node: Node) -> list[_Subject]:
        """Remove and return all that a node is part of."""
        gone = self._of_unit.pop(node.unit_key, {})
        for key, subject in gone.items():
            del self.subjects[key]
            self._changed.pop(subject, None)
            self._odd.pop(subject, None)
            for other in filter(None, key):
                if other in self._of_unit:
                    del self._of_unit[other][key]
                    self._name(other, node.unit_epoch, is_ready=False)
        self._met.discard(node.routing_id)
        self._partners.pop(node.unit_key, None)
        self._votes = None
        return list(gone.values())

    def take(self, subject: _Subject, answer: Answer) -> bool:
        """Take the answer to a canary. Return whether that makes a pair or node ready."""
        subject.answer = answer
        if not subject.is_pair:
            self._votes = None
        return self.judge(subject)

    def lack(self, subject: _Subject) -> bool:
        """Take note that a canary got no answer, or none yet. Return whether that makes a pair or node ready."""
        if not subject.is_pair:
            self._votes = None  # nobody waits for its vote
        return self.judge(subject)

    def judge(self, *changed: _Subject) -> bool:
        """Judge these again, or all if the votes have changed. Return whether one is ready now that was not."""
        judged: Iterable[_Subject] = changed
        if self._votes is None:
            keys: list[_Key] = [key for unit_key in self._of_unit for key in ((unit_key, None), (None, unit_key))]
            alone = [self.subjects[key] for key in keys if key in self.subjects]
            answers = {each.name: each.answer for each in alone if each.answer is not None}
            pending = [each for each in alone if each.is_pending]
            self._votes = Votes(answers, len(alone), len(pending))
            if not self._votes.are_unanimous:
                _ask(self.subjects.values())
            elif len(answers) == 1:
                _ask(pending)
            if self._odd or not self._votes.decide_as(self._judged_by):
                judged = self.subjects.values()
            else:  # as for nearly every vote: only those may change that have to do with these nodes
                judged = {pair: None for each in changed for pair in self._with(each)}
            self._judged_by = self._votes
        became_ready = [self._judge_one(self._votes, subject) for subject in judged]
        return any(became_ready)

    def _with(self, subject: _Subject) -> Iterable[_Subject]:
        """Return a pair alone, or a node alone with all its pairs."""
        unit_key = next(filter(None, _key(*subject.nodes)))
        return (subject,) if subject.is_pair else self._of_unit[unit_key].values()

    def _judge_one(self, votes: Votes, subject: _Subject) -> bool:
        own = self._own(subject)
        if subject.answer is not None:
            _ask(own)
        before = subject.verdict
        verdict = votes.verdict(subject.answer, {each.name: each.answer for each in own})
        if verdict in (UNTRIED, before):
            return False
        subject.verdict = verdict
        _log(subject.name, before, verdict)
        return verdict == READY

    def _own(self, subject: _Subject) -> list[_Subject]:
        """Return what is known of the two nodes of a pair alone."""
        prefill, decode = _key(*subject.nodes)
        keys: list[_Key] = [(None, decode), (prefill, None)] if subject.is_pair else []
        return [self.subjects[key] for key in keys if key in self.subjects]

    def _has_changed(self, subject: _Subject) -> None:
        self._changed[subject] = None
        if subject.verdict in (READY, UNTRIED):
            self._odd.pop(subject, None)
        else:
            self._odd[subject] = None

    def proven(self, node: Node) -> tuple[str, ...]:
        """Return the epochs of the nodes with which a node is in a pair that is ready, as is each of the two alone."""
        for subject in {pair: None for each in self._changed for pair in self._with(each)}:
            prefill, decode = subject.nodes
            if prefill is not None and decode is not None:
                is_ready = all(each.is_ready for each in (subject, *self._own(subject)))
                self._name(prefill.unit_key, decode.unit_epoch, is_ready=is_ready)
                self._name(decode.unit_key, prefill.unit_epoch, is_ready=is_ready)
        self._changed.clear()
        partners = self._partners[node.unit_key]
        if partners.told is None:
            partners.told = tuple(sorted(partners.epochs)[:MAX_PROVEN])
        return partners.told

    def _name(self, unit_key: bytes, epoch: str, *, is_ready: bool) -> None:
        """Have a node name a partner, or not."""
        partners = self._partners[unit_key]
        if is_ready != (epoch in partners.epochs):
            partners.told = None
            (partners.epochs.add if is_ready else partners.epochs.discard)(epoch)


class PairHealth:
    """States of all pairs and nodes alone, and the canaries under way. `groups` is a view of the registry's groups."""

    def __init__(self, groups: Mapping[GroupKey, NodeGroup], interval_s: float, epoch: str = "") -> None:
        """`epoch`: the router's."""
        self._epoch = epoch
        self._groups = groups
        self._interval_s = interval_s
        self._votes: dict[NodeGroup, _Vote] = {}
        self._runs: dict[str, tuple[_Vote, _Subject]] = {}  # by the rid of the canary's request under way
        self._full: dict[_Subject, None] = {}  # whose canaries found no room
        # what nodes remember, if it is not what their Hello said; None: a message may be lost
        self._told: dict[Node, tuple[str, ...] | None] = {}
        # told before this router had the prompt, by partner
        self._early: dict[tuple[Node, str], CanaryOutcome] = {}
        self._tested: dict[str, None] = {}  # epochs of nodes that had canaries or failures here, the oldest first

    @property
    def is_ready(self) -> bool:
        """Whether a pair that takes new requests is ready, or a decode node that takes local prompts."""
        return any(self.is_usable(*nodes) for group in self._groups.values() for nodes in _serving(group))

    @property
    def reason(self) -> str:
        """Why no pair is ready, for operators."""
        groups = list(self._groups.values())
        failures = [state for group in groups for state in self._failures(group)]
        words = [
            failures[0] if failures else missing_for_service(groups),
            drain_summary(node for group in groups for node in group.nodes.values()),
        ]
        return "; ".join(filter(None, words)) or "no canary request has passed yet"

    def why_unusable(self, group: NodeGroup) -> str:
        """Return why no pair of the group may get requests, for operators."""
        if not _serving(group):
            return "its nodes know no common protocol version"
        return next(iter(self._failures(group)), "no canary request has passed yet")

    def state(self, prefill: Node | None, decode: Node | None) -> str:
        """Return the state of a pair or of a node alone: "ready", "untried", or a sentence on what is wrong with it."""
        subject = self._find(prefill, decode)
        return "untried" if subject is None else subject.state

    def is_usable(self, prefill: Node | None, decode: Node | None) -> bool:
        """Return whether a pair or a node alone may get requests."""
        subject = self._find(prefill, decode)
        return subject is not None and subject.is_ready

    def is_reported(self, prefill: Node, decode: Node) -> bool:
        """Return whether a pair is ready because its nodes say so, and no canary of this router has passed yet."""
        subject = self._find(prefill, decode)
        return subject is not None and subject.is_ready and subject.answer is None

    def hands_over(self, group: NodeGroup) -> bool:
        """Return whether a pair of the group is not known to fail in handing pages over."""
        has_pairs = False
        for nodes in group.pairs():
            has_pairs, pair = True, self._find(*nodes)
            if pair is None or pair.failure is None:
                return True
        return not has_pairs

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
            subject.was_full = False  # room brings no canary earlier than this
            num_before = subject.num_failed_transfers
            subject.num_failed_transfers += 1
            subject.retry_at = now + (min(2.0 ** min(num_before, 16), MAX_RETRY_S) if num_before else 0.0)

    def forget(self, node: Node) -> None:
        """Remove a node that is gone, with its pairs, its vote and the canaries under way on it."""
        self._told.pop(node, None)
        self._early = {key: told for key, told in self._early.items() if key[0] is not node}
        vote = self._votes.get(node.group)
        if vote is not None:
            self._leave(vote.forget(node))
            vote.judge()

    def forget_group(self, group: NodeGroup) -> None:
        """Remove all that is known of a group."""
        vote = self._votes.pop(group, None)
        self._leave([] if vote is None else list(vote.subjects.values()))

    def told(self, node: Node) -> tuple[str, ...]:
        """Return the epochs that the node will name to the next router; none if a message to it may be lost."""
        return self._told.get(node, node.hello.proven) or ()

    def untold(self, node: Node) -> None:
        """Record that the last TellProven may not have reached the node. The next `look` sends it again."""
        self._told[node] = None

    def look(self, now: float) -> list[Effect]:
        """Start the canaries that are due, and tell nodes what is new. Call it several times per second."""
        effects: list[Effect] = []
        for vote, subject in self._runs.values():
            assert subject.canary is not None, subject.name
            was_late = subject.canary.is_late
            subject.canary.look(now)
            if subject.canary.is_late and not was_late and vote.lack(subject):
                effects.append(PairsReady(vote.group))
        for group in self._groups.values():
            if group.tokenizer is None:
                continue
            if group not in self._votes or not self._votes[group].prompt.fits:
                self.forget_group(group)
                self._votes[group] = _Vote(group, self._tested)
                for (node, _), told in [each for each in self._early.items() if each[0][0].group is group]:
                    effects += self.heard(node, told, now)
            vote = self._votes[group]
            effects += self._test_group(vote, now)
            for node in group.nodes.values():
                epochs = vote.proven(node)
                told = self._told.get(node, node.hello.proven)
                if told is not epochs and node.knows(Proven):
                    self._told[node] = epochs
                    effects += [] if told == epochs else [TellProven(node, epochs)]
        return effects

    def _test_group(self, vote: _Vote, now: float) -> Iterator[Effect]:
        """Start the canaries of a group that are due. Those of a large group's pairs wait while many are under way."""
        pairs_per_look, num_before = vote.pairs_per_look, vote.num_taken_over
        for nodes in vote.in_turn():
            subject = vote.subject(nodes, now, self._interval_s)
            interval_s = self._interval_s * (pairs_per_look if subject.is_pair else 1.0)
            waits = subject.is_pair and pairs_per_look > 1 and len(self._runs) >= LARGE_RUNS
            if not waits or subject.is_doubted:
                yield from self._test(vote, subject, nodes, interval_s, now)
        if vote.num_taken_over > num_before:
            logger.info("%d pairs are ready, as their nodes report", vote.num_taken_over - num_before)

    def capacity_freed(self, now: float) -> list[Effect]:
        """Try the canaries again that found no room, because a decode node may have room now.

        Pairs and nodes that are ready need no hurry: they wait for their next turn.
        """
        full = [each for each in self._full if each.was_full and not each.is_ready]
        self._full.clear()
        for subject in full:
            subject.retry_at = now
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
        effects: list[Effect] = [PairsReady(vote.group)] if vote.take(subject, canary.answer) else []
        return effects + _tell(vote, subject, canary.answer)

    def failed(self, request: Request, reason: str, now: float) -> list[Effect]:
        """A canary's request ended with an error."""
        if request.rid in self._runs:
            vote, subject = self._runs.pop(request.rid)
            logger.error("%s: its canary failed: %s", subject.name, reason)
            subject.canary, subject.failure = None, f"{subject.name}: its canary failed: {reason}"
            subject.retry_at = max(subject.retry_at, now + RETRY_S)
            effects: list[Effect] = [PairsReady(vote.group)] if vote.lack(subject) else []
            return effects + _tell(vote, subject, (), reason)
        return []

    def heard(self, node: Node, told: CanaryOutcome, now: float) -> list[Effect]:
        """A node tells how a canary of another router went."""
        vote, nodes = self._votes.get(node.group), nodes_of(node, told)
        if nodes is None:
            return []
        if vote is None or vote.prompt.digest != told.prompt:
            self._early[node, told.partner] = told
            return []
        self._early.pop((node, told.partner), None)
        subject = vote.subject(nodes, now, self._interval_s)
        subject.told_at = now
        if told.failure or subject.failure is not None:  # what fails for one router may work for another
            subject.is_doubted |= now - subject.worked_at > AWAITED_S
            return []
        subject.is_doubted &= subject.answer is not None
        subject.worked_at = now
        return [PairsReady(vote.group)] if vote.take(subject, answer_told(told)) else []

    def no_room(self, request: Request, now: float) -> None:
        """The nodes of a canary have no room for it. That is no fault; the canary is tried again soon."""
        if request.rid in self._runs:
            _, subject = self._runs.pop(request.rid)
            subject.canary, subject.was_full, subject.retry_at = None, True, now + FULL_RETRY_S
            self._full[subject] = None
            subject.is_doubted |= subject.was_doubted

    def _test(self, vote: _Vote, subject: _Subject, nodes: Pinned, interval_s: float, now: float) -> list[Effect]:
        """Start a canary on these nodes if one is due, after `interval_s` without a request if they are ready."""
        if subject.canary is not None or now < subject.retry_at or not self._is_due(subject, nodes, interval_s, now):
            return []
        subject.retry_at = now + RETRY_S
        subject.was_doubted, subject.is_doubted, subject.was_full = subject.is_doubted, False, False
        subject.canary = Canary(vote.prompt, nodes)
        return [self._start(vote, subject, subject.canary, now)]

    def _is_due(self, subject: _Subject, nodes: Pinned, interval_s: float, now: float) -> bool:
        """Return whether these nodes need a canary, and no other router is about to send it."""
        if subject.is_doubted:
            return True
        due_at = max(subject.told_at, subject.worked_at + interval_s) if subject.is_ready else subject.told_at
        wait_s = AWAITED_S if is_of_another(nodes, self._epoch) else 0.0
        return now >= due_at + wait_s

    def _start(self, vote: _Vote, subject: _Subject, canary: Canary, now: float) -> StartCanary:
        request = canary.next_request(now)
        self._runs[request.rid] = vote, subject
        return StartCanary(request, canary.nodes)

    def _find(self, prefill: Node | None, decode: Node | None) -> _Subject | None:
        node = decode if prefill is None else prefill
        vote = self._votes.get(node.group) if node is not None else None
        return None if vote is None else vote.subjects.get(_key(prefill, decode))

    def _failures(self, group: NodeGroup) -> Iterator[str]:
        """Yield what is wrong in a group, pairs first."""
        vote = self._votes.get(group)
        for subject in (self._find(*nodes) for nodes in (vote.tested() if vote is not None else ())):
            if subject is not None and subject.state not in ("ready", "untried"):
                yield subject.state

    def _leave(self, subjects: list[_Subject]) -> None:
        """Forget the canaries of subjects that are no more: their ends change nothing. Remember that their nodes were
        tested."""
        gone = set(subjects)
        self._runs = {rid: run for rid, run in self._runs.items() if run[1] not in gone}
        for subject in subjects:
            if subject.is_tested:
                self._tested |= {node.unit_epoch: None for node in subject.nodes if node is not None}
        for epoch in list(self._tested)[:-MAX_TESTED]:
            del self._tested[epoch]


def _ask(subjects: Iterable[_Subject]) -> None:
    """Have those answer that have not answered yet, although they may be ready by what their nodes report."""
    for subject in subjects:
        subject.is_doubted |= subject.answer is None and subject.canary is None


def _tell(vote: _Vote, subject: _Subject, answer: Answer, failure: str = "") -> list[Effect]:
    told = outcome(vote.prompt, subject.nodes, answer, failure)
    return [] if told is None else [TellOutcome(*told)]


def _serving(group: NodeGroup) -> list[Pinned]:
    """Return the pairs that take new work, and the decode nodes that compute prompts."""
    return [*group.pairs(), *((None, node) for node in group.local_nodes())]


def _key(prefill: Node | None, decode: Node | None) -> _Key:
    return None if prefill is None else prefill.unit_key, None if decode is None else decode.unit_key


def _log(name: str, before: Verdict, after: Verdict) -> None:
    match after.state:
        case "ready":
            logger.info("%s is ready", name)
        case "faulty":
            logger.error("%s is faulty: %s", name, after.words)
        case _ if before.state != after.state:
            logger.warning("%s is %s: %s", name, after.state, after.words)
        case _:
            logger.debug("%s is %s: %s", name, after.state, after.words)
