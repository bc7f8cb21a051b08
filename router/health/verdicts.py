"""A vote on which pairs of a group compute correctly: nodes answer one prompt, and the answers are compared.

A pure automaton, without clock. Each node has one vote: the answer that it computes alone. The answer that most nodes
gave is the group's, if no other one has as many votes. The canary of a pair is compared with it, and with what its two
nodes compute alone; it is no vote. The order in which answers came does not count.

    a pair is     if its canary
    faulty        differs from what one of its nodes computes alone, or from the answer of more than half of all nodes
    ready         is the group's answer, and another node than its prefill node gave that answer alone
    unconfirmed   is the group's answer, and no such node has answered yet
    undecided     is none of these: nodes disagree, and it takes another answer to say who is right

If a decode node is too old to compute alone, the answer of the prefill node makes their pair ready. What two present
nodes once agreed on is remembered. It is one more vote, unless two present nodes give it.
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


Voters = tuple[Voter, ...]  # the prefill and the decode node of a pair, or a node alone


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
        self._answers: dict[Voters, Answer] = {}
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
        self._unable.pop(voter, None)
        self._answers = {voters: answer for voters, answer in self._answers.items() if voter not in voters}
        self._count()

    def take(self, voters: Voters, answer: Answer) -> None:
        """Take the answer of a pair's canary or of a node alone, instead of an earlier one. Nothing happens if one of
        the nodes is gone."""
        if all(voter in self._can_vote for voter in voters):
            self._answers[voters] = answer
            self._count()

    def unable(self, voter: Voter, reason: str) -> None:
        """Record that a node could not compute the prompt alone. The vote goes on without it."""
        if voter in self._can_vote:
            self._unable[voter] = reason

    def verdict(self, voters: Voters) -> Verdict:
        """Return the verdict on a pair, or on a node that computes whole answers alone."""
        answer = self._answers.get(voters)
        if answer is None:
            return UNTRIED
        if len(voters) == 1:
            return self._compared(answer)
        prefill, decode = voters
        for node in (decode, prefill):
            own = self._answers.get((node,))
            if own is not None and not self._agree(answer, own):
                return Verdict("faulty", f"its canary gave {answer}, but {node} alone computes {own}")
        verdict = self._compared(answer) if self._votes else READY
        asked = decode if self._can_vote[decode] else prefill
        others = (given for voter, given in self._votes if voter != prefill or asked == prefill)
        if verdict != READY or any(self._agree(answer, given) for given in others):
            return verdict
        why = self._unable.get(asked, "it is asked to")
        return Verdict("unconfirmed", f"its canary gave {answer}, which {asked} has not computed alone yet: {why}")

    def wanted(self) -> list[Voter]:
        """Return the nodes that should compute the prompt alone, also those that could not do so before.

        If answers differ, these are all nodes that have not, and those whose own answer is not the group's. If answers
        agree but fewer than two nodes voted, these are the decode nodes of the canaries, or else one prefill node.
        """
        tried = {voter for voters in self._answers if len(voters) == 2 for voter in voters}
        if not tried:
            return []
        unheard = [voter for voter, can in self._can_vote.items() if can and (voter,) not in self._answers]
        known, leader = self._known(), self._leader
        if not all(self._agree(known[0], answer) for answer in known):
            own = [(voter, answer) for voter, answer in self._votes if voter is not None]
            return unheard + [voter for voter, answer in own if leader is None or not self._agree(leader, answer)]
        if len(self._votes) >= 2:
            return []
        decodes = [voter for voter in unheard if voter in tried and voter.role == "decode"]
        prefills = [voter for voter in unheard if voter.role == "prefill"]
        if any(voter not in self._unable for voter in decodes):
            return decodes
        return decodes + sorted(prefills, key=lambda voter: voter in self._unable)[:1]

    def _count(self) -> None:
        """Determine the group's answer."""
        own: list[tuple[Voter | None, Answer]] = [
            (voters[0], answer) for voters, answer in self._answers.items() if len(voters) == 1
        ]
        self._votes, remembered = own, self._remembered
        if remembered is not None and self._num_for(remembered) < 2:
            self._votes = [*own, (None, remembered)]
        support = {answer: self._num_for(answer) for _, answer in self._votes}
        best = [answer for answer, num_votes in support.items() if num_votes == max(support.values())]
        self._leader = best[0] if best and all(self._agree(best[0], other) for other in best) else None
        num_nodes = sum(self._can_vote.values()) + len(self._votes) - len(own)
        self._has_majority = self._leader is not None and 2 * support[self._leader] > num_nodes
        if self._leader is not None and sum(self._agree(self._leader, answer) for _, answer in own) >= 2:
            self._remembered = self._leader

    def _known(self) -> list[Answer]:
        """Return the answers of all pairs, then the votes."""
        return [answer for voters, answer in self._answers.items() if len(voters) == 2] + [
            answer for _, answer in self._votes
        ]

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
        given = [voters for voters, each in self._answers.items() if self._agree(answer, each)]
        alone = sorted(str(voters[0]) for voters in given if len(voters) == 1)
        pairs = sorted(f"pair {voters[0].name} -> {voters[1].name}" for voters in given if len(voters) == 2)
        named = alone or pairs or ["nodes that were here before"]
        return ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")

    def _camps(self) -> str:
        """Return who gave which answer, for every different answer."""
        camps: list[Answer] = []
        for answer in self._known():
            if not any(self._agree(answer, known) for known in camps):
                camps.append(answer)
        return "; ".join(f"{self._names(answer)} gave {answer}" for answer in camps)
