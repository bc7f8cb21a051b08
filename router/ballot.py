"""Which pairs of a group compute rightly: a vote of its nodes on the answer to one prompt.

A pure automaton: answers come in as events, the clock as an argument; out come a verdict on each pair, and who must
compute the prompt alone next. canary.py asks the nodes. A witness is an answer with the nodes that it depends on:

    a pair's canary              the prefill and the decode node
    a node's own answer          that node alone
    what the group remembers     nobody who is here: two witnesses that shared no node once agreed on it

The group's answer is the one that blames the fewest nodes. An answer blames as many nodes as must be faulty to explain
every witness who contradicts it; if two blame equally few, the one with more witnesses holds. Nobody's answer holds
because it was first.

A pair is faulty if its canary differs from the group's answer, or from what one of its two nodes computes alone. It is
ready if its canary is the group's answer and somebody confirms it: its decode node alone, or two witnesses that share
no node. Until then it is unconfirmed. While answers differ, and none has two witnesses that share no node, all pairs
are undecided, until everybody was heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from ..metadata.wire.node_info import Role

RETRY_S = 2.0  # a node whose own answer is in the minority, or did not come, is asked again after so long

State = Literal["untried", "unconfirmed", "undecided", "ready", "faulty"]


class Answer(NamedTuple):
    """The tokens of one answer, and each one's lead over the next best, in log-probability."""

    ids: tuple[int, ...]
    leads: tuple[float, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.ids)) or "no token"


class Voter(NamedTuple):
    """One life of a node. `key` tells it from others of its name."""

    role: Role
    name: str
    key: bytes

    def __str__(self) -> str:
        return f"{self.role} node {self.name}"


class Verdict(NamedTuple):
    """The verdict on a pair; it has `words` unless the pair is ready or untried."""

    state: State
    words: str = ""


class Witness(NamedTuple):
    """An answer and the nodes that gave it together."""

    nodes: tuple[Voter, ...]
    answer: Answer


class _Own(NamedTuple):
    answer: Answer
    at: float  # when it came


class _Unable(NamedTuple):
    reason: str
    at: float


UNTRIED = Verdict("untried")
READY = Verdict("ready")


class Ballot:
    """All answers of one group. `tie_gap`: two answers agree from the first place on where both were nearly another."""

    def __init__(self, tie_gap: float) -> None:
        self._tie_gap = tie_gap
        self._voters: dict[Voter, bool] = {}  # whether it can compute the prompt alone
        self._canaries: dict[tuple[Voter, Voter], Answer] = {}
        self._own: dict[Voter, _Own] = {}
        self._unable: dict[Voter, _Unable] = {}
        self._remembered: Answer | None = None
        self._truth: Answer | None = None
        self._is_confirmed = False  # by two witnesses that share no node

    # --- events ---

    def joined(self, voter: Voter, *, can_compute: bool) -> None:
        """A node that may be asked for its own answer if it can give one. Nothing happens if it is known."""
        self._voters.setdefault(voter, can_compute)

    def left(self, voter: Voter) -> None:
        """The node is gone, and all answers that it had a part in."""
        self._voters.pop(voter, None)
        self._own.pop(voter, None)
        self._unable.pop(voter, None)
        self._canaries = {pair: answer for pair, answer in self._canaries.items() if voter not in pair}
        self._count()

    def canary(self, prefill: Voter, decode: Voter, answer: Answer) -> None:
        """A canary went through the pair; its earlier answer counts no more."""
        if self._canaries.get((prefill, decode)) != answer:
            self._canaries[prefill, decode] = answer
            self._count()

    def own(self, voter: Voter, answer: Answer, now: float) -> None:
        """A node has computed the prompt alone."""
        if voter not in self._voters:
            return
        self._unable.pop(voter, None)
        before, self._own[voter] = self._own.get(voter), _Own(answer, now)
        if before is None or before.answer != answer:
            self._count()

    def unable(self, voter: Voter, reason: str, now: float) -> None:
        """A node could not compute the prompt alone: the others do not wait for it, and it is asked again."""
        if voter in self._voters:
            self._unable[voter] = _Unable(reason, now)

    # --- what follows ---

    def verdict(self, prefill: Voter, decode: Voter) -> Verdict:
        """Return the verdict on a pair."""
        answer = self._canaries.get((prefill, decode))
        if answer is None:
            return UNTRIED
        for node in (decode, prefill):
            own = self._own.get(node)
            if own is not None and not self._agree(answer, own.answer):
                return Verdict("faulty", f"its canary gave {answer}, but {node} alone computes {own.answer}")
        if self._truth is None or self._may_yet_be_told:
            return Verdict("undecided", f"nodes disagree, and nobody can tell yet who is right: {self._camps()}")
        if not self._agree(self._truth, answer):
            return Verdict("faulty", f"its canary gave {answer}; {self._names(self._truth)} gave {self._truth}")
        if self._is_confirmed or decode in self._own or not self._voters.get(decode, False):
            return READY
        why = self._unable[decode].reason if decode in self._unable else "it is asked to"
        return Verdict("unconfirmed", f"its canary gave {answer}, which {decode} has not computed alone yet: {why}")

    def wanted(self, now: float) -> list[Voter]:
        """Nodes that should compute the prompt alone now: everybody if answers differ; else, if the answer has no two
        independent witnesses, the decode nodes that gave it, and if those do not suffice a prefill node."""
        if not self._canaries:
            return []
        able = [voter for voter, can_compute in self._voters.items() if can_compute and self._may_retry(voter, now)]
        lacking = [voter for voter in able if voter not in self._own]
        if self._is_disputed:
            return lacking + [voter for voter in able if self._is_doubted(voter, now)]
        if self._is_confirmed:
            return []
        decodes = [voter for voter in lacking if any(voter == decode for _, decode in self._canaries)]
        prefills = [voter for voter in lacking if any(voter == prefill for prefill, _ in self._canaries)]
        return decodes or prefills[:1]

    # --- the count ---

    def _may_retry(self, voter: Voter, now: float) -> bool:
        return voter not in self._unable or now - self._unable[voter].at >= RETRY_S

    @property
    def _may_yet_be_told(self) -> bool:
        """Answers differ, none has two independent witnesses, and somebody has not been heard."""
        heard = self._own.keys() | self._unable.keys()
        lacks = any(can_compute and voter not in heard for voter, can_compute in self._voters.items())
        return lacks and not self._is_confirmed and self._is_disputed

    @property
    def _is_disputed(self) -> bool:
        answers = [witness.answer for witness in self._all_witnesses()]
        return any(not self._agree(answers[0], answer) for answer in answers[1:])

    def _is_doubted(self, voter: Voter, now: float) -> bool:
        own = self._own.get(voter)
        if own is None or now - own.at < RETRY_S:
            return False
        return self._truth is None or not self._agree(self._truth, own.answer)

    def _witnesses(self) -> list[Witness]:
        witnesses = [Witness(pair, answer) for pair, answer in self._canaries.items()]
        return witnesses + [Witness((voter,), own.answer) for voter, own in self._own.items()]

    def _all_witnesses(self) -> list[Witness]:
        """With what is remembered, unless two who are here say it themselves."""
        here = self._witnesses()
        if self._remembered is None or self._num_for(self._remembered, here) >= 2:
            return here
        return [*here, Witness((), self._remembered)]

    def _count(self) -> None:
        """Finds the group's answer anew."""
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
        self._truth = best[0] if is_clear else None
        self._is_confirmed = self._truth is not None and self._num_for(self._truth, witnesses) >= 2
        if self._truth is not None and self._num_for(self._truth, here) >= 2:
            self._remembered = self._truth

    def _num_for(self, answer: Answer, witnesses: Iterable[Witness]) -> int:
        return num_independent(each.nodes for each in witnesses if self._agree(answer, each.answer))

    def _num_against(self, answer: Answer, witnesses: Iterable[Witness]) -> int:
        return num_independent(each.nodes for each in witnesses if not self._agree(answer, each.answer))

    def _agree(self, one: Answer, other: Answer) -> bool:
        """Equal up to the first place where both were as good as another token: what follows depends on that one."""
        for place, (here, there) in enumerate(zip(one.ids, other.ids, strict=False)):
            if here != there:
                return max(one.leads[place], other.leads[place]) < self._tie_gap
        return len(one.ids) == len(other.ids)

    # --- words ---

    def _names(self, answer: Answer) -> str:
        """Return the names of the witnesses: nodes that computed alone, else pairs."""
        alone = [str(voter) for voter, own in self._own.items() if self._agree(answer, own.answer)]
        pairs = [
            f"pair {prefill.name} -> {decode.name}"
            for (prefill, decode), given in self._canaries.items()
            if self._agree(answer, given)
        ]
        named = sorted(alone) or sorted(pairs) or ["nodes that were here before"]
        return ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")

    def _camps(self) -> str:
        camps: list[Answer] = []
        for answer in [witness.answer for witness in self._all_witnesses()]:
            if not any(self._agree(answer, known) for known in camps):
                camps.append(answer)
        return "; ".join(f"{self._names(answer)} gave {answer}" for answer in camps)


def num_independent(witnesses: Iterable[Sequence[Voter]]) -> int:
    """The most of these witnesses of which no two share a node, each named by its nodes (a prefill and a decode node, a
    single one, or none). As many nodes must be faulty, at least and at most, if all of them are wrong (Koenig)."""
    edges: dict[object, list[object]] = {}
    for number, nodes in enumerate(witnesses):
        prefill = next((node for node in nodes if node.role == "prefill"), ("no prefill node", number))
        decode = next((node for node in nodes if node.role == "decode"), ("no decode node", number))
        edges.setdefault(prefill, []).append(decode)
    partner: dict[object, object] = {}

    def pairs_up(prefill: object, seen: set[object]) -> bool:
        for decode in edges[prefill]:
            if decode in seen:
                continue
            seen.add(decode)
            if decode not in partner or pairs_up(partner[decode], seen):
                partner[decode] = prefill
                return True
        return False

    return sum(pairs_up(prefill, set()) for prefill in edges)
