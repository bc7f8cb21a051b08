"""A vote on which pairs of a group compute correctly: nodes answer one prompt, and the answers are compared.

A pure automaton, without clock. Each node has one vote: the answer that it computes alone. The answer that most nodes
gave is the group's, if no other one has as many votes. The canary of a pair is compared with it, and with what its two
nodes compute alone; it is no vote. The order in which answers came does not count.

    a pair is     if its canary
    faulty        differs from what one of its nodes computes alone, or from the answer of more than half of all nodes
    ready         is the group's answer, and another node than its prefill node gave that answer alone
    unconfirmed   is the group's answer, and no such node has answered yet
    undecided     is none of these: nodes disagree, and it takes another answer to say who is right

What two present nodes once agreed on is remembered. It is one more vote, unless two present nodes give it.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from ...metadata.wire.node_info import Role

State = Literal["untried", "unconfirmed", "undecided", "ready", "faulty"]


class Rival(NamedTuple):
    """A likely token that was not generated."""

    token_id: int
    distance: float  # by how much its log-probability is less than that of the generated token


class Answer(NamedTuple):
    """Generated tokens, and for each of them its rivals, the likeliest first."""

    ids: tuple[int, ...]
    rivals: tuple[tuple[Rival, ...], ...]

    def distance(self, index: int, token_id: int) -> float:
        """Return by how much a token is less likely than the one at `index`; of an unknown one at least so much."""
        rivals = self.rivals[index]
        known = (rival.distance for rival in rivals if rival.token_id == token_id)
        return next(known, rivals[-1].distance if rivals else math.inf)

    def __str__(self) -> str:
        return " ".join(map(str, self.ids)) or "no token"


class Voter(NamedTuple):
    """One process of a node. `key` distinguishes it from other processes of the same name."""

    role: Role
    name: str
    key: bytes

    def __str__(self) -> str:
        return f"{self.role} node {self.name}"


class Verdict(NamedTuple):
    """The verdict on a pair, or on a node alone. `words` say why, unless the state is ready or untried."""

    state: State
    words: str = ""


UNTRIED = Verdict("untried")
READY = Verdict("ready")


class Ballot:
    """All answers of one group.

    Two answers that differ agree nevertheless if, at their first difference, the token of each was nearly as good for
    the other: less than `tie_gap` away. All later tokens depend on it.
    """

    def __init__(self, tie_gap: float) -> None:
        self._tie_gap = tie_gap
        self._can_vote: dict[Voter, bool] = {}  # all nodes; whether each can compute the prompt alone
        self._canaries: dict[tuple[Voter, Voter], Answer] = {}
        self._own: dict[Voter, Answer] = {}
        self._unable: dict[Voter, str] = {}  # why a node gave no own answer when it was last asked
        self._remembered: Answer | None = None
        self._votes: list[tuple[Voter | None, Answer]] = []  # own answers, and the remembered one without its nodes
        self._leader: Answer | None = None  # the group's answer
        self._has_majority = False  # more than half of all nodes gave it

    def joined(self, voter: Voter, *, can_compute: bool) -> None:
        """Add a node. It may be asked for its own answer if `can_compute`. Nothing happens if it is known."""
        if voter not in self._can_vote:
            self._can_vote[voter] = can_compute
            self._count()

    def left(self, voter: Voter) -> None:
        """Remove a node that is gone, with all answers that depend on it."""
        self._can_vote.pop(voter, None)
        self._own.pop(voter, None)
        self._unable.pop(voter, None)
        self._canaries = {pair: answer for pair, answer in self._canaries.items() if voter not in pair}
        self._count()

    def canary(self, prefill: Voter, decode: Voter, answer: Answer) -> None:
        """Note the answer of a pair's canary instead of its earlier one. Nothing happens if one of the two is gone."""
        if prefill in self._can_vote and decode in self._can_vote:
            self._canaries[prefill, decode] = answer

    def own(self, voter: Voter, answer: Answer) -> None:
        """Count a node's own answer instead of its earlier one. Nothing happens if the node is gone."""
        if voter in self._can_vote:
            self._unable.pop(voter, None)
            self._own[voter] = answer
            self._count()

    def unable(self, voter: Voter, reason: str) -> None:
        """Record that a node could not compute the prompt alone. The vote goes on without it."""
        if voter in self._can_vote:
            self._unable[voter] = reason

    def verdict(self, prefill: Voter, decode: Voter) -> Verdict:
        """Return the verdict on a pair."""
        answer = self._canaries.get((prefill, decode))
        if answer is None:
            return UNTRIED
        for node in (decode, prefill):
            own = self._own.get(node)
            if own is not None and not self._agree(answer, own):
                return Verdict("faulty", f"its canary gave {answer}, but {node} alone computes {own}")
        verdict = self._compared(answer) if self._votes else READY
        asked = decode if self._can_vote[decode] else prefill
        others = (given for voter, given in self._votes if voter != prefill or asked == prefill)
        if verdict != READY or any(self._agree(answer, given) for given in others):
            return verdict
        why = self._unable.get(asked, "it is asked to")
        return Verdict("unconfirmed", f"its canary gave {answer}, which {asked} has not computed alone yet: {why}")

    def verdict_alone(self, voter: Voter) -> Verdict:
        """Return the verdict on a node that computes whole answers alone."""
        own = self._own.get(voter)
        return UNTRIED if own is None else self._compared(own)

    def wanted(self) -> list[Voter]:
        """Return the nodes that should compute the prompt alone, also those that could not do so before.

        If answers differ, these are all nodes that have not, and those whose own answer is not the group's. If answers
        agree but fewer than two nodes voted, these are the decode nodes of the canaries, or else one prefill node.
        """
        if not self._canaries:
            return []
        unheard = [voter for voter, can_vote in self._can_vote.items() if can_vote and voter not in self._own]
        answers = [*self._canaries.values(), *(answer for _, answer in self._votes)]
        if not all(self._agree(answers[0], answer) for answer in answers):
            leader = self._leader
            return unheard + [
                voter for voter, own in self._own.items() if leader is None or not self._agree(leader, own)
            ]
        if len(self._votes) >= 2:
            return []
        tried = {voter for pair in self._canaries for voter in pair}
        decodes = [voter for voter in unheard if voter in tried and voter.role == "decode"]
        prefills = [voter for voter in unheard if voter in tried and voter.role == "prefill"]
        if any(voter not in self._unable for voter in decodes):
            return decodes
        return decodes + sorted(prefills, key=lambda voter: voter in self._unable)[:1]

    def _count(self) -> None:
        """Determine the group's answer."""
        self._votes = list(self._own.items())
        remembered = self._remembered
        if remembered is not None and self._num_for(remembered) < 2:
            self._votes.append((None, remembered))
        support = {answer: self._num_for(answer) for _, answer in self._votes}
        best = [answer for answer, num_votes in support.items() if num_votes == max(support.values())]
        self._leader = best[0] if best and all(self._agree(best[0], other) for other in best) else None
        num_nodes = sum(self._can_vote.values()) + len(self._votes) - len(self._own)
        self._has_majority = self._leader is not None and 2 * support[self._leader] > num_nodes
        if self._leader is not None and sum(self._agree(self._leader, own) for own in self._own.values()) >= 2:
            self._remembered = self._leader

    def _num_for(self, answer: Answer) -> int:
        return sum(self._agree(answer, given) for _, given in self._votes)

    def _compared(self, answer: Answer) -> Verdict:
        """Return the verdict on an answer by the votes, of which there is one at least."""
        if self._leader is not None and self._agree(self._leader, answer):
            return READY
        if self._leader is not None and self._has_majority:
            return Verdict("faulty", f"its canary gave {answer}; {self._names(self._leader)} gave {self._leader}")
        return Verdict("undecided", f"nodes disagree, and nobody can tell yet who is right: {self._camps()}")

    def _agree(self, one: Answer, other: Answer) -> bool:
        """Return whether two answers are equal up to their first tie."""
        for index, (here, there) in enumerate(zip(one.ids, other.ids, strict=False)):
            if here != there:
                return max(one.distance(index, there), other.distance(index, here)) < self._tie_gap
        return len(one.ids) == len(other.ids)

    def _names(self, answer: Answer) -> str:
        """Return who gave an answer: nodes that computed it alone, or else pairs."""
        alone = [str(voter) for voter, own in self._own.items() if self._agree(answer, own)]
        pairs = [
            f"pair {prefill.name} -> {decode.name}"
            for (prefill, decode), given in self._canaries.items()
            if self._agree(answer, given)
        ]
        named = sorted(alone) or sorted(pairs) or ["nodes that were here before"]
        return ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")

    def _camps(self) -> str:
        """Return who gave which answer, for every different answer."""
        camps: list[Answer] = []
        for answer in [*self._canaries.values(), *(given for _, given in self._votes)]:
            if not any(self._agree(answer, known) for known in camps):
                camps.append(answer)
        return "; ".join(f"{self._names(answer)} gave {answer}" for answer in camps)
