"""Is a (prefill, decode) pair ready? A canary is a greedy request of several pages under a fresh salt that goes
through exactly that pair. Its answer is a vote in the group's ballot (ballot.py), which says who else computes the
canary's prompt: a decode or a prefill node alone, under another fresh salt, so that it finds no pages of others.

Pairs that served a request lately need no canary. A pair without room is not at fault. A pair whose canary failed, or
on which a transfer failed, gets no requests until a later canary passes. A client that leaves says nothing of a pair.
An untried pair gets requests if each of its nodes is in a pair that is ready.
"""

from __future__ import annotations

import logging
import secrets
import time

from ..metadata.errors import BatonError
from ..metadata.wire.request import SamplingParams, TokenLogprobs
from .absence import drains
from .ballot import UNTRIED, Verdict, Voter
from .canaries import Canaries
from .election import NUM_TOKENS, Election, answer_of, prompt_len, voter_of
from .node import Group, Node
from .queue import PairFull, Pinned
from .request import Delta, Request, Sequence

logger = logging.getLogger(__name__)

RETRY_S = 2.0  # after a failed canary
FULL_RETRY_S = 0.5  # after one that found no room
TIMEOUT_S = 30.0


class Pair:
    """What is known of one pair."""

    __slots__ = ("canary", "failure", "is_doubted", "retry_at", "verdict", "was_full", "worked_at")

    def __init__(self) -> None:
        self.worked_at: float | None = None
        self.retry_at = 0.0  # not before
        self.failure: str | None = None  # of a canary that had no answer, or of a transfer
        self.verdict: Verdict = UNTRIED
        self.canary: Request | None = None
        self.was_full = False
        self.is_doubted = False  # a request failed on it, but not in transfer


class PairHealth:
    """All pairs of live nodes, and the canaries under way."""

    def __init__(self, dispatcher: Canaries, interval_s: float) -> None:
        self._dispatcher = dispatcher
        self._interval_s = interval_s
        self._pairs: dict[tuple[bytes, bytes], Pair] = {}
        self._elections: dict[Group, Election] = {}
        self._proven: set[bytes] = set()  # routing ids of the nodes in pairs that are ready

    @property
    def is_ready(self) -> bool:
        """At least one pair works and takes new requests."""
        return any(
            self.state(prefill, decode) == "ready"
            for group in self._dispatcher.registry.groups.values()
            for prefill, decode in group.pairs()
        )

    @property
    def reason(self) -> str:
        """Why no pair works, in words."""
        registry = self._dispatcher.registry
        live = [pair for group in registry.groups.values() for pair in group.pairs()]
        failures = [words for pair in live if (words := self.state(*pair)) not in ("ready", "untried")]
        words = [failures[0] if failures else registry.unready_reason(), drains(registry.nodes.values())]
        return "; ".join(filter(None, words)) or "no canary request has passed yet"

    def failure_in(self, group: Group) -> str:
        """Why no pair of a group works, in words."""
        failures = [self.state(*pair) for pair in group.pairs() if not self.is_usable(*pair)]
        told = [words for words in failures if words != "untried"]
        if failures and not told:
            return "no canary request has passed yet"
        return told[0] if told else "its nodes know no common protocol version"

    def state(self, prefill: Node, decode: Node) -> str:
        """A word on one pair: ready, untried, or what is wrong with it."""
        pair = self._pairs.get((prefill.routing_id, decode.routing_id))
        if pair is None:
            return "untried"
        if pair.failure is not None:
            return pair.failure
        if pair.verdict.words:
            return f"pair {_name(prefill, decode)} is {pair.verdict.state}: {pair.verdict.words}"
        return "ready" if pair.worked_at is not None and self.is_usable(prefill, decode) else "untried"

    def is_usable(self, prefill: Node, decode: Node) -> bool:
        """False before the pair is known to be right, after a failed canary or transfer, and where the two know no
        common protocol."""
        if not prefill.shares_protocol(decode.hello):
            return False
        pair = self._pairs.get((prefill.routing_id, decode.routing_id))
        if pair is None or (pair.failure is None and pair.verdict.state == "untried"):
            return prefill.routing_id in self._proven and decode.routing_id in self._proven
        return pair.failure is None and pair.verdict.state == "ready"

    def may_answer_alone(self, prefill: Node) -> bool:
        """Whether a prefill node may answer requests for one token, which no decode node sees: unless pairs of it are
        known to be wrong, or nobody can tell, and none is known to be right."""
        if prefill.routing_id in self._proven:
            return True
        verdicts = (pair.verdict.state for key, pair in self._pairs.items() if key[0] == prefill.routing_id)
        return not any(state in ("faulty", "undecided") for state in verdicts)

    def worked(self, prefill: Node, decode: Node, now: float) -> None:
        """A request went through the pair."""
        pair = self._pairs.setdefault((prefill.routing_id, decode.routing_id), Pair())
        pair.worked_at = now

    def doubt(self, prefill: Node, decode: Node, failure: str | None) -> None:
        """A request failed on the pair: a canary looks into it at once. `failure`, of a transfer, in words: until then
        the pair gets no requests."""
        pair = self._pairs.get((prefill.routing_id, decode.routing_id))
        if pair is None:
            return
        pair.is_doubted = True
        if failure is not None and pair.failure is None:
            name = _name(prefill, decode)
            logger.warning("pair %s is taken out: %s", name, failure)
            pair.failure = f"pair {name}: {failure}"
            pair.retry_at = 0.0

    def forget(self, node: Node) -> None:
        """The node is gone, and with it all its pairs and its votes."""
        for key in [key for key in self._pairs if node.routing_id in key]:
            del self._pairs[key]
        election = self._elections.get(node.group)
        if election is not None:
            election.ballot.left(voter_of(node))
            self._recount(election)

    def forget_group(self, group: Group) -> None:
        """The group is no more, and its answer with it."""
        self._elections.pop(group, None)

    def made_room(self, now: float) -> None:
        """A decode node may have room again: canaries of pairs that get no requests yet go first."""
        full = [pair for pair in self._pairs.values() if pair.was_full and pair.verdict.state != "ready"]
        alone = [election for election in self._elections.values() if election.full_until]
        for pair in full:
            pair.retry_at = 0.0
        for election in alone:
            election.full_until.clear()
        if full or alone:
            self.look(now)

    def look(self, now: float) -> None:
        """Starts the canaries that are due, and gives up those that hang."""
        for group in self._dispatcher.registry.groups.values():
            if group.tokenizer is None:
                continue
            pairs = list(group.pairs())
            if not pairs:
                continue
            election = self._election(group)
            for prefill, decode in pairs:
                election.join(prefill)
                election.join(decode)
                pair = self._pairs.setdefault((prefill.routing_id, decode.routing_id), Pair())
                self._look_at(election, prefill, decode, pair, now)
            self._ask_alone(election, now)

    def voted(self, election: Election) -> None:
        """An answer has come."""
        if self._elections.get(election.group) is not election:
            return
        if self._recount(election):
            self._dispatcher.pump(election.group)
        self._ask_alone(election, time.monotonic())

    def _election(self, group: Group) -> Election:
        """The group's, or another one if a node has joined that has no room for the prompt."""
        election = self._elections.get(group)
        if election is None or len(election.prompt) > prompt_len(group):
            for request in list(election.alone.values()) if election is not None else ():
                self._dispatcher.fail(request, BatonError("another canary takes its place"))
            election = self._elections[group] = Election(group)
            self._recount(election)
            for (prefill, _), pair in self._pairs.items():
                if prefill in group.nodes:
                    pair.worked_at, pair.retry_at = None, 0.0
        return election

    def _look_at(self, election: Election, prefill: Node, decode: Node, pair: Pair, now: float) -> None:
        if pair.canary is not None:
            if now - pair.canary.created_at > TIMEOUT_S:
                self._dispatcher.fail(pair.canary, BatonError(f"no answer within {TIMEOUT_S:.0f} s"))
            return
        if now < pair.retry_at:
            return
        has_worked_lately = pair.worked_at is not None and now - pair.worked_at < self._interval_s
        is_well = pair.failure is None and self.is_usable(prefill, decode)
        if has_worked_lately and is_well and not pair.is_doubted:
            return
        pair.retry_at = now + RETRY_S
        pair.is_doubted = False
        run = _Canary(self, election, pair, prefill, decode)
        pair.canary = _request(election, run, now)
        pair.was_full = not self._dispatcher.submit_canary(pair.canary, (prefill, decode))
        if pair.was_full:
            pair.canary = None
            pair.retry_at = now + FULL_RETRY_S

    def _ask_alone(self, election: Election, now: float) -> None:
        """Asks the nodes that the ballot wants to hear alone, and gives up those that do not answer."""
        for request in list(election.alone.values()):
            if now - request.created_at > TIMEOUT_S:
                self._dispatcher.fail(request, BatonError(f"no answer within {TIMEOUT_S:.0f} s"))
        for voter in election.ballot.wanted(now):
            if voter in election.alone or now < election.full_until.get(voter, 0.0):
                continue
            node = election.node(voter)
            if node is None:
                election.ballot.unable(voter, "it takes no new work", now)
                self._recount(election)
            else:
                _Alone(self, election, voter, node).ask(now)

    def submit_alone(self, election: Election, voter: Voter, request: Request, pinned: Pinned) -> None:
        """Sends a node a canary of its own; it is asked again later if it has no room."""
        election.alone[voter] = request
        if not self._dispatcher.submit_canary(request, pinned):
            self.has_no_room(election, voter, request.created_at)

    def has_no_room(self, election: Election, voter: Voter, now: float) -> None:
        """A node could not take a canary of its own."""
        election.alone.pop(voter, None)
        election.full_until[voter] = now + FULL_RETRY_S

    def _recount(self, election: Election) -> bool:
        """Takes the ballot's verdicts over. Returns whether a pair became ready."""
        has_new = False
        for prefill in election.group.nodes.values():
            for decode in election.group.nodes.values():
                pair = self._pairs.get((prefill.routing_id, decode.routing_id))
                if pair is None:
                    continue
                before, pair.verdict = pair.verdict, election.ballot.verdict(voter_of(prefill), voter_of(decode))
                if before != pair.verdict:
                    has_new |= pair.verdict.state == "ready"
                    _log(_name(prefill, decode), before, pair.verdict)
        ready = [key for key, pair in self._pairs.items() if pair.verdict.state == "ready"]
        self._proven = {routing_id for key in ready for routing_id in key}
        return has_new


class _Canary:
    """Listens to one canary request."""

    def __init__(self, health: PairHealth, election: Election, pair: Pair, prefill: Node, decode: Node) -> None:
        self._health = health
        self._election = election
        self._pair = pair
        self._prefill, self._decode = prefill, decode
        self._logprobs: list[TokenLogprobs] = []

    def on_delta(self, _choice: Sequence, delta: Delta) -> None:
        self._logprobs += delta.logprobs

    def on_done(self, request: Request) -> None:
        self._pair.canary = self._pair.failure = None
        self._pair.worked_at = time.monotonic()
        answer = answer_of(request.sequences[0].received, self._logprobs)
        self._election.ballot.canary(voter_of(self._prefill), voter_of(self._decode), answer)
        self._health.voted(self._election)

    def on_error(self, _request: Request, error: BatonError) -> None:
        self._pair.canary = None
        if isinstance(error, PairFull):
            self._pair.was_full = True
            self._pair.retry_at = time.monotonic() + FULL_RETRY_S
        else:
            name = _name(self._prefill, self._decode)
            logger.error("pair %s: its canary failed: %s", name, error)
            self._pair.failure = f"pair {name}: its canary failed: {error}"


class _Alone:
    """Has one node compute the prompt alone: a decode node in one request, a prefill node token by token."""

    def __init__(self, health: PairHealth, election: Election, voter: Voter, node: Node) -> None:
        self._health = health
        self._election = election
        self._voter = voter
        self._node = node
        self._salt = secrets.token_hex(8)
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def ask(self, now: float) -> None:
        """For the tokens that are still missing, or the next one."""
        is_prefill = self._voter.role == "prefill"
        most = len(self._ids) + 1 if is_prefill else NUM_TOKENS
        request = _request(self._election, self, now, max_tokens=most, salt=self._salt)
        request.sequences[0].received.extend(self._ids)
        request.sequences[0].restart()
        pinned = (self._node, None) if is_prefill else (None, self._node)
        self._health.submit_alone(self._election, self._voter, request, pinned)

    def on_delta(self, _choice: Sequence, delta: Delta) -> None:
        self._logprobs += delta.logprobs

    def on_done(self, request: Request) -> None:
        now = time.monotonic()
        self._ids = list(request.sequences[0].received)
        if self._voter.role == "prefill" and len(self._ids) < NUM_TOKENS:
            self.ask(now)
            return
        self._election.alone.pop(self._voter, None)
        answer = answer_of(self._ids, self._logprobs)
        logger.debug("%s alone computes the canary's %s", self._voter, answer)
        self._election.ballot.own(self._voter, answer, now)
        self._health.voted(self._election)

    def on_error(self, _request: Request, error: BatonError) -> None:
        now = time.monotonic()
        if isinstance(error, PairFull):
            self._health.has_no_room(self._election, self._voter, now)
            return
        self._election.alone.pop(self._voter, None)
        logger.error("%s could not compute a canary alone: %s", self._voter, error)
        self._election.ballot.unable(self._voter, str(error), now)
        self._health.voted(self._election)


def _request(
    election: Election, listener: _Canary | _Alone, now: float, *, max_tokens: int = NUM_TOKENS, salt: str | None = None
) -> Request:
    return Request(
        f"canary-{secrets.token_hex(6)}",
        election.group,
        election.prompt,
        SamplingParams(max_tokens=max_tokens, temperature=0.0, num_logprobs=2),
        listener,
        salt=salt or secrets.token_hex(8),
        now=now,
        is_canary=True,
    )


def _name(prefill: Node, decode: Node) -> str:
    return f"{prefill.node_id} -> {decode.node_id}"


def _log(name: str, before: Verdict, after: Verdict) -> None:
    match after.state:
        case "ready":
            logger.info("pair %s is ready", name)
        case "faulty":
            logger.error("pair %s is faulty: %s", name, after.words)
        case "undecided" if before.state != "undecided":
            logger.warning("pair %s is undecided: %s", name, after.words)
        case _:
            logger.debug("pair %s is %s: %s", name, after.state, after.words)
