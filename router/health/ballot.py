"""A vote on which pairs of a group compute correctly: nodes answer one prompt, and the answers are compared.

A pure automaton. Answers come in as events, with the time. It returns a verdict on each pair, and the nodes that should
compute the prompt alone next; health.py asks them. A witness is an answer with the nodes that it depends on:

    witness                      depends on
    a pair's canary              the prefill and the decode node
    a node's own answer          that node
    the remembered answer        no present node: two witnesses that shared no node once agreed on it

The group's answer is the one that blames the fewest nodes. An answer blames as many nodes as must be faulty to explain
every witness that contradicts it. If two answers blame equally few, the one with more witnesses is the group's. The
order in which answers came does not count.

A pair is faulty if its canary differs from the group's answer, or from what one of its two nodes computes alone. It is
ready if its canary gave the group's answer and that answer is confirmed: by its decode node alone, or by two witnesses
that share no node. Until then it is unconfirmed. All pairs are undecided while answers differ, no answer has two
witnesses that share no node, and a node that could compute alone has not been heard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from ...metadata.wire.node_info import Role

RETRY_S = 2.0  # until a node is asked again that gave no own answer, or another one than the group's

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
    """The verdict on a pair. `words` say why, unless the pair is ready or untried."""

    state: State
    words: str = ""


class Witness(NamedTuple):
    """An answer and the nodes that gave it together."""

    nodes: tuple[Voter, ...]
    answer: Answer


class _OwnAnswer(NamedTuple):
    """Answer that a node computed alone, and its time."""

    answer: Answer
    at: float


class _NoAnswer(NamedTuple):
    """Why a node could not compute the prompt alone, and when it was asked."""

    reason: str
    at: float


UNTRIED = Verdict("untried")
READY = Verdict("ready")


class Ballot:
    """All answers of one group.

    Two answers that differ agree nevertheless if, at their first difference, the token of each was nearly as good for
    the other: less than `tie_gap` away. All later tokens depend on it.
    """

    def __init__(self, tie_gap: float) -> None:
        self._tie_gap = tie_gap
        self._can_compute: dict[Voter, bool] = {}  # all voters; whether each can compute the prompt alone
        self._canaries: dict[tuple[Voter, Voter], Answer] = {}
        self._own: dict[Voter, _OwnAnswer] = {}
        self._unable: dict[Voter, _NoAnswer] = {}
        self._remembered: Answer | None = None
        self._group_answer: Answer | None = None
        self._is_confirmed = False  # two witnesses that share no node gave the group's answer

    def joined(self, voter: Voter, *, can_compute: bool) -> None:
        """Add a node. It may be asked for its own answer if `can_compute`. Nothing happens if it is known."""
        self._can_compute.setdefault(voter, can_compute)

    def left(self, voter: Voter) -> None:
        """Remove a node that is gone, with all answers that depend on it."""
        self._can_compute.pop(voter, None)
        self._own.pop(voter, None)
        self._unable.pop(voter, None)
        self._canaries = {pair: answer for pair, answer in self._canaries.items() if voter not in pair}
        self._count()

    def canary(self, prefill: Voter, decode: Voter, answer: Answer) -> None:
        """Count the answer of a pair's canary instead of its earlier one. Nothing happens if one of the two is gone."""
        if prefill not in self._can_compute or decode not in self._can_compute:
            return
        if self._canaries.get((prefill, decode)) != answer:
            self._canaries[prefill, decode] = answer
            self._count()

    def own(self, voter: Voter, answer: Answer, now: float) -> None:
        """Count a node's own answer instead of its earlier one."""
        if voter not in self._can_compute:
            return
        before, self._own[voter] = self._own.get(voter), _OwnAnswer(answer, now)
        if before is None or before.answer != answer:
            self._count()

    def unable(self, voter: Voter, reason: str, now: float) -> None:
        """Record that a node could not compute the prompt alone. The vote goes on without it; it is asked again."""
        if voter in self._can_compute:
            self._unable[voter] = _NoAnswer(reason, now)

    def verdict(self, prefill: Voter, decode: Voter) -> Verdict:
        """Return the verdict on a pair."""
        answer = self._canaries.get((prefill, decode))
        if answer is None:
            return UNTRIED
        for node in (decode, prefill):
            own = self._own.get(node)
            if own is not None and not self._agree(answer, own.answer):
                return Verdict("faulty", f"its canary gave {answer}, but {node} alone computes {own.answer}")
        if self._group_answer is None or self._is_open:
            return Verdict("undecided", f"nodes disagree, and nobody can tell yet who is right: {self._camps()}")
        if not self._agree(self._group_answer, answer):
            names = self._names(self._group_answer)
            return Verdict("faulty", f"its canary gave {answer}; {names} gave {self._group_answer}")
        if self._is_confirmed or decode in self._own or not self._can_compute[decode]:
            return READY
        why = self._unable[decode].reason if decode in self._unable else "it is asked to"
        return Verdict("unconfirmed", f"its canary gave {answer}, which {decode} has not computed alone yet: {why}")

    def verdict_alone(self, voter: Voter) -> Verdict:
        """Return the verdict on a node that computes whole answers alone."""
        own = self._own.get(voter)
        if own is None:
            return UNTRIED
        if self._group_answer is None or self._is_open:
            return Verdict("undecided", f"nodes disagree, and nobody can tell yet who is right: {self._camps()}")
        if not self._agree(self._group_answer, own.answer):
            names = self._names(self._group_answer)
            return Verdict("faulty", f"its canary gave {own.answer}; {names} gave {self._group_answer}")
        return READY

    def wanted(self, now: float) -> list[Voter]:
        """Return the nodes that should compute the prompt alone now.

        If answers differ, these are all nodes that have not, and those whose own answer is not the group's. If answers
        agree but no two witnesses are independent, these are the decode nodes of the canaries, then one prefill node.
        """
        if not self._canaries:
            return []
        able = [voter for voter, can in self._can_compute.items() if can and self._may_ask(voter, now)]
        unheard = [voter for voter in able if voter not in self._own]
        if self._is_disputed:
            return unheard + [voter for voter in able if self._is_doubted(voter, now)]
        if self._is_confirmed:
            return []
        decodes = [voter for voter in unheard if any(voter == decode for _, decode in self._canaries)]
        prefills = [voter for voter in unheard if any(voter == prefill for prefill, _ in self._canaries)]
        return decodes or prefills[:1]

    def _may_ask(self, voter: Voter, now: float) -> bool:
        return voter not in self._unable or now - self._unable[voter].at >= RETRY_S

    @property
    def _is_open(self) -> bool:
        """Whether answers differ, none has two independent witnesses, and an own answer may still decide."""
        heard = self._own.keys() | self._unable.keys()
        has_unheard = any(can_compute and voter not in heard for voter, can_compute in self._can_compute.items())
        return has_unheard and not self._is_confirmed and self._is_disputed

    @property
    def _is_disputed(self) -> bool:
        answers = [witness.answer for witness in self._all_witnesses()]
        return any(not self._agree(answers[0], answer) for answer in answers[1:])

    def _is_doubted(self, voter: Voter, now: float) -> bool:
        own = self._own.get(voter)
        if own is None or now - own.at < RETRY_S:
            return False
        return self._group_answer is None or not self._agree(self._group_answer, own.answer)

    def _witnesses(self) -> list[Witness]:
        witnesses = [Witness(pair, answer) for pair, answer in self._canaries.items()]
        return witnesses + [Witness((voter,), own.answer) for voter, own in self._own.items()]

    def _all_witnesses(self) -> list[Witness]:
        """Return the present witnesses and the remembered answer, unless two present ones gave that answer."""
        here = self._witnesses()
        if self._remembered is None or self._num_for(self._remembered, here) >= 2:
            return here
        return [*here, Witness((), self._remembered)]

    def _count(self) -> None:
        """Determine the group's answer from all witnesses."""
        here, witnesses = self._witnesses(), self._all_witnesses()
        ranks = {
            answer: (
                self._num_against(answer, witnesses),
                self._num_against(answer, here),
                sum(not self._agree(answer, each.answer) for each in witnesses),
            )
            for answer in dict.fromkeys(witness.answer for witness in witnesses)
        }
        best = [answer for answer, rank in ranks.items() if rank == min(ranks.values())]
        is_clear = bool(best) and all(self._agree(best[0], other) for other in best[1:])
        winner = self._group_answer = best[0] if is_clear else None
        self._is_confirmed = winner is not None and self._num_for(winner, witnesses) >= 2
        if winner is not None and self._num_for(winner, here) >= 2:
            self._remembered = winner

    def _num_for(self, answer: Answer, witnesses: Iterable[Witness]) -> int:
        return num_independent(each.nodes for each in witnesses if self._agree(answer, each.answer))

    def _num_against(self, answer: Answer, witnesses: Iterable[Witness]) -> int:
        return num_independent(each.nodes for each in witnesses if not self._agree(answer, each.answer))

    def _agree(self, one: Answer, other: Answer) -> bool:
        """Return whether two answers are equal up to their first tie."""
        for index, (here, there) in enumerate(zip(one.ids, other.ids, strict=False)):
            if here != there:
                return max(one.distance(index, there), other.distance(index, here)) < self._tie_gap
        return len(one.ids) == len(other.ids)

    def _names(self, answer: Answer) -> str:
        """Return the names of the witnesses of an answer: nodes that computed it alone, or else pairs."""
        alone = [str(voter) for voter, own in self._own.items() if self._agree(answer, own.answer)]
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
        for answer in [witness.answer for witness in self._all_witnesses()]:
            if not any(self._agree(answer, known) for known in camps):
                camps.append(answer)
        return "; ".join(f"{self._names(answer)} gave {answer}" for answer in camps)


def num_independent(witnesses: Iterable[Sequence[Voter]]) -> int:
    """Return the size of the largest set of these witnesses of which no two share a node.

    A witness is given by its nodes: a prefill and a decode node, a single one, or none. If all of them are wrong, this
    is also the smallest number of faulty nodes that explains it (Koenig's theorem on bipartite graphs).
    """
    edges: dict[object, list[object]] = {}
    for number, nodes in enumerate(witnesses):
        prefill = next((node for node in nodes if node.role == "prefill"), number)  # a number is shared with no other
        decode = next((node for node in nodes if node.role == "decode"), number)
        edges.setdefault(prefill, []).append(decode)
    partner: dict[object, object] = {}
    return sum(_pairs_up(prefill, edges, partner, set()) for prefill in edges)


def _pairs_up(
    prefill: object, edges: dict[object, list[object]], partner: dict[object, object], seen: set[object]
) -> bool:
    """Find a partner among `edges` for a prefill node, and other partners for those that must give way. `partner`: of
    each decode node, changed in place. `seen`: decode nodes that were tried, likewise."""
    for decode in edges[prefill]:
        if decode in seen:
            continue
        seen.add(decode)
        if decode not in partner or _pairs_up(partner[decode], edges, partner, seen):
            partner[decode] = prefill
            return True
    return False
