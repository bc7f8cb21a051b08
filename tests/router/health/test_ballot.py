"""The vote on canaries: which answer becomes the group's, which pairs are faulty, which nodes are asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.health.ballot import RETRY_S, Answer, Ballot, Rival, Verdict, Voter, num_independent

GAP = 1e-4
P = [Voter("prefill", f"p{i}", b"p%d" % i) for i in range(4)]
D = [Voter("decode", f"d{i}", b"d%d" % i) for i in range(4)]


FAR = Rival(99, 1.0)  # nobody generates it


def says(*ids: int, second: tuple[Rival, ...] = ()) -> Answer:
    """Return an answer whose second token has these rivals before FAR, the only one of the other tokens."""
    return Answer(ids, tuple((*second, FAR) if index == 1 else (FAR,) for index in range(len(ids))))


RIGHT, WRONG, OTHER = says(1, 2, 3, 4), says(1, 9, 9, 9), says(7, 7, 7, 7)


def ballot(num_prefill: int, num_decode: int, *, can_compute: bool = True) -> Ballot:
    """Return the ballot of nodes that have just joined."""
    ballot = Ballot(GAP)
    for voter in P[:num_prefill] + D[:num_decode]:
        ballot.joined(voter, can_compute=can_compute)
    return ballot


def states(ballot: Ballot, num_prefill: int, num_decode: int) -> list[list[str]]:
    """Return the states of all pairs: a row per prefill node, a column per decode node."""
    return [[ballot.verdict(p, d).state for d in D[:num_decode]] for p in P[:num_prefill]]


def test_a_single_pair_waits_for_the_answer_of_its_decode_node_alone() -> None:
    each = ballot(1, 1)
    assert each.wanted(0.0) == [] and each.verdict(P[0], D[0]).state == "untried"
    each.canary(P[0], D[0], RIGHT)
    verdict = each.verdict(P[0], D[0])
    assert (verdict.state, each.wanted(0.0)) == ("unconfirmed", [D[0]])
    assert verdict.words == "its canary gave 1 2 3 4, which decode node d0 has not computed alone yet: it is asked to"
    each.own(D[0], RIGHT, 0.0)
    assert each.verdict(P[0], D[0]).state == "ready"
    assert each.wanted(0.0) == [P[0]], "d0 may be wrong in both answers, so a node that shares nothing with it is asked"
    each.own(P[0], RIGHT, 0.0)
    assert each.wanted(1e9) == []


def test_a_canary_is_compared_with_what_either_of_its_nodes_computes_alone() -> None:
    for node in (P[0], D[0]):
        each = ballot(1, 1)
        each.canary(P[0], D[0], WRONG)
        each.own(node, RIGHT, 0.0)
        verdict = each.verdict(P[0], D[0])
        assert verdict.state == "faulty" and f"but {node} alone computes {RIGHT}" in verdict.words


def test_if_the_two_answers_of_a_single_pair_differ_the_verdict_names_both() -> None:
    each = ballot(1, 1)
    each.canary(P[0], D[0], WRONG)
    each.own(D[0], RIGHT, 0.0)
    verdict = each.verdict(P[0], D[0])
    assert verdict.state == "faulty"
    assert verdict.words == "its canary gave 1 9 9 9, but decode node d0 alone computes 1 2 3 4"


def test_two_pairs_that_share_no_node_need_no_other_witness() -> None:
    each = ballot(2, 2)
    each.canary(P[0], D[0], RIGHT)
    each.canary(P[1], D[1], RIGHT)
    assert each.wanted(0.0) == [] and states(each, 2, 2) == [["ready", "untried"], ["untried", "ready"]]


def test_pairs_that_share_a_node_are_one_witness() -> None:
    """A prefill node with wrong KV makes every decode node give the same wrong answer."""
    each = ballot(1, 3)
    for decode in D[:3]:
        each.canary(P[0], decode, WRONG)
    assert states(each, 1, 3) == [["unconfirmed"] * 3] and each.wanted(0.0) == D[:3]
    for decode in D[:3]:
        each.own(decode, RIGHT, 0.0)
    assert states(each, 1, 3) == [["faulty"] * 3]


def test_three_pairs_against_one() -> None:
    each = ballot(2, 2)
    for prefill, decode in ((P[0], D[0]), (P[0], D[1]), (P[1], D[0])):
        each.canary(prefill, decode, RIGHT)
    each.canary(P[1], D[1], WRONG)
    assert states(each, 2, 2) == [["ready", "ready"], ["ready", "faulty"]]
    assert "its canary gave 1 9 9 9; " in each.verdict(P[1], D[1]).words
    assert "gave 1 2 3 4" in each.verdict(P[1], D[1]).words


def test_two_against_two_by_a_prefill_node() -> None:
    """The answers of the faulty pairs come first."""
    each = ballot(2, 2)
    for decode in D[:2]:
        each.canary(P[0], decode, WRONG)
    for decode in D[:2]:
        each.canary(P[1], decode, RIGHT)
    assert states(each, 2, 2) == [["undecided"] * 2] * 2
    assert set(each.wanted(0.0)) == {*P[:2], *D[:2]}
    assert "nobody can tell yet who is right" in each.verdict(P[0], D[0]).words
    each.own(D[1], RIGHT, 0.0)
    assert states(each, 2, 2) == [["faulty"] * 2, ["ready"] * 2], "d1 alone and the pair p1 -> d0 share no node"
    assert each.verdict(P[0], D[0]).words == "its canary gave 1 9 9 9; decode node d1 gave 1 2 3 4"
    each.own(D[0], RIGHT, 0.0)
    assert each.verdict(P[0], D[0]).words == "its canary gave 1 9 9 9, but decode node d0 alone computes 1 2 3 4"


def test_two_against_two_by_a_decode_node_that_is_wrong_in_all_it_does() -> None:
    """Its canaries equal its own answer. The own answers of the prefill nodes decide."""
    each = ballot(2, 2)
    for prefill in P[:2]:
        each.canary(prefill, D[0], WRONG)
        each.canary(prefill, D[1], RIGHT)
    each.own(D[0], WRONG, 0.0)
    each.own(D[1], RIGHT, 0.0)
    assert states(each, 2, 2) == [["undecided"] * 2] * 2
    words = each.verdict(P[0], D[0]).words
    assert "decode node d0 gave 1 9 9 9" in words and "decode node d1 gave 1 2 3 4" in words
    assert each.wanted(0.0) == P[:2]
    each.own(P[0], RIGHT, 0.0)
    assert states(each, 2, 2) == [["faulty", "ready"]] * 2


def test_condemned_pairs_come_back_once_the_vote_is_decided() -> None:
    """The first decode node is always wrong, so that a good one that joins later looks wrong at first."""
    each = ballot(1, 1)
    each.canary(P[0], D[0], WRONG)
    each.own(D[0], WRONG, 0.0)
    assert states(each, 1, 1) == [["ready"]], "no node here could contradict it"
    each.joined(D[1], can_compute=True)
    each.canary(P[0], D[1], RIGHT)
    assert states(each, 1, 2) == [["undecided", "undecided"]] and each.wanted(0.0) == [P[0], D[1]]
    each.own(D[1], RIGHT, 0.0)
    assert states(each, 1, 2) == [["undecided", "undecided"]]
    each.own(P[0], RIGHT, 0.0)
    assert states(each, 1, 2) == [["faulty", "ready"]]


def test_a_faulty_pair_that_joins_later_condemns_no_good_pair() -> None:
    each = ballot(2, 1)
    each.canary(P[0], D[0], RIGHT)
    each.own(D[0], RIGHT, 0.0)
    each.own(P[0], RIGHT, 0.0)
    each.canary(P[1], D[0], WRONG)
    assert states(each, 2, 1) == [["ready"], ["faulty"]]
    each.joined(D[1], can_compute=True)
    each.canary(P[0], D[1], OTHER)
    assert [each.verdict(P[0], decode).state for decode in D[:2]] == ["ready", "faulty"]


def test_a_pair_that_goes_bad_later_and_recovers() -> None:
    each = ballot(2, 2)
    for prefill in P[:2]:
        for decode in D[:2]:
            each.canary(prefill, decode, RIGHT)
    each.canary(P[0], D[0], WRONG)
    assert states(each, 2, 2) == [["faulty", "ready"], ["ready", "ready"]]
    each.canary(P[0], D[0], RIGHT)
    assert states(each, 2, 2) == [["ready", "ready"]] * 2


def test_a_node_in_the_minority_computes_again_after_a_while() -> None:
    each = ballot(2, 2)
    for prefill in P[:2]:
        for decode in D[:2]:
            each.canary(prefill, decode, RIGHT if decode is D[0] else OTHER)
    for voter, answer in ((P[0], RIGHT), (P[1], RIGHT), (D[0], RIGHT), (D[1], OTHER)):
        each.own(voter, answer, 100.0)
    assert states(each, 2, 2) == [["ready", "faulty"]] * 2
    assert each.wanted(100.0 + RETRY_S / 2) == [] and each.wanted(100.0 + RETRY_S) == [D[1]]
    for prefill in P[:2]:
        each.canary(prefill, D[1], RIGHT)
    assert states(each, 2, 2) == [["ready", "faulty"]] * 2, "its own answer still differs"
    each.own(D[1], RIGHT, 120.0)
    assert states(each, 2, 2) == [["ready", "ready"]] * 2 and each.wanted(1e9) == []


def test_answers_of_a_node_that_leaves_are_removed_unless_two_witnesses_agreed() -> None:
    each = ballot(2, 2)
    each.canary(P[0], D[0], RIGHT)
    each.canary(P[1], D[1], RIGHT)
    each.left(P[1])
    each.left(D[0])
    each.left(D[1])
    assert states(each, 2, 2) == [["untried"] * 2] * 2
    each.joined(D[2], can_compute=True)
    each.canary(P[0], D[2], WRONG)
    assert each.verdict(P[0], D[2]).state == "undecided"
    assert "nodes that were here before gave 1 2 3 4" in each.verdict(P[0], D[2]).words
    each.own(D[2], WRONG, 0.0)
    each.own(P[0], WRONG, 0.0)
    assert each.verdict(P[0], D[2]).state == "ready", "two present witnesses outvote the remembered answer"


def test_a_remembered_answer_is_no_further_witness_beside_the_nodes_that_gave_it() -> None:
    each = ballot(2, 2)
    for node, answer in ((P[0], RIGHT), (P[1], RIGHT), (D[0], WRONG), (D[1], WRONG)):
        each.own(node, answer, 0.0)
    assert [each.verdict_alone(node).state for node in (*P[:2], *D[:2])] == ["undecided"] * 4


def test_an_answer_of_one_pair_is_not_remembered() -> None:
    each = ballot(2, 2)
    each.canary(P[0], D[0], WRONG)
    each.left(P[0])
    each.left(D[0])
    each.canary(P[1], D[1], RIGHT)
    each.own(D[1], RIGHT, 0.0)
    assert each.verdict(P[1], D[1]).state == "ready"


def test_decode_nodes_that_cannot_compute_alone_vote_by_their_pairs() -> None:
    each = ballot(1, 1, can_compute=False)
    each.canary(P[0], D[0], RIGHT)
    assert each.wanted(0.0) == [] and states(each, 1, 1) == [["ready"]]
    each = ballot(2, 2, can_compute=False)
    for prefill in P[:2]:
        for decode in D[:2]:
            each.canary(prefill, decode, WRONG if prefill is P[0] else RIGHT)
    assert states(each, 2, 2) == [["undecided"] * 2] * 2, "no witness can decide, so no pair serves"
    each.left(P[0])
    assert [each.verdict(P[1], decode).state for decode in D[:2]] == ["ready"] * 2


def test_the_vote_does_not_wait_for_a_node_that_cannot_answer() -> None:
    each = ballot(1, 2)
    each.canary(P[0], D[0], RIGHT)
    each.canary(P[0], D[1], WRONG)
    each.own(D[0], RIGHT, 0.0)
    assert states(each, 1, 2) == [["undecided"] * 2] and each.wanted(0.0) == [P[0], D[1]]
    each.unable(P[0], "it is full", 5.0)
    each.unable(D[1], "it is full", 5.0)
    assert states(each, 1, 2) == [["ready", "faulty"]], "the number of witnesses decides"
    assert each.wanted(5.0) == [] and each.wanted(5.0 + RETRY_S) == [P[0], D[1]]


def test_a_pair_whose_decode_node_cannot_answer_is_not_ready() -> None:
    each = ballot(1, 1)
    each.canary(P[0], D[0], RIGHT)
    each.unable(D[0], "it has no room", 0.0)
    assert each.verdict(P[0], D[0]).state == "unconfirmed"
    assert "not computed alone yet: it has no room" in each.verdict(P[0], D[0]).words
    each.own(D[0], RIGHT, 3.0)
    assert each.verdict(P[0], D[0]).state == "ready"


def test_the_verdict_on_a_node_that_computes_alone() -> None:
    each = ballot(2, 2)
    assert each.verdict_alone(D[0]) == Verdict("untried")
    each.own(D[0], RIGHT, 0.0)
    assert each.verdict_alone(D[0]) == Verdict("ready") and each.verdict_alone(D[1]) == Verdict("untried")
    each.own(D[1], WRONG, 0.0)
    words = f"decode node d0 gave {RIGHT}; decode node d1 gave {WRONG}"
    undecided = Verdict("undecided", f"nodes disagree, and nobody can tell yet who is right: {words}")
    assert each.verdict_alone(D[0]) == each.verdict_alone(D[1]) == undecided
    each.own(P[0], RIGHT, 0.0)
    names = "decode node d0, prefill node p0"
    faulty = Verdict("faulty", f"its canary gave {WRONG}; {names} gave {RIGHT}")
    assert each.verdict_alone(D[0]) == Verdict("ready") and each.verdict_alone(D[1]) == faulty
    each.own(P[1], says(1, 2, 3), 0.0)  # ends too early
    assert each.verdict_alone(P[1]).state == "faulty"


def test_answers_of_equal_weight_are_undecided_even_when_nobody_is_left_to_ask() -> None:
    each = ballot(0, 2)
    each.own(D[0], RIGHT, 0.0)
    each.own(D[1], WRONG, 0.0)
    assert [each.verdict_alone(node).state for node in D[:2]] == ["undecided"] * 2


def test_one_prefill_node_is_asked_to_confirm_an_answer_not_all_of_them() -> None:
    each = ballot(3, 1)
    for prefill in P[:3]:
        each.canary(prefill, D[0], RIGHT)
    each.own(D[0], RIGHT, 0.0)
    assert len(each.wanted(0.0)) == 1 and each.wanted(0.0)[0] in P[:3]


def test_a_verdict_names_four_witnesses_and_counts_the_others() -> None:
    for num_right in (3, 4, 5, 7):
        each, right = ballot(4, 4), [*D, *P][:num_right]
        for node in right:
            each.own(node, RIGHT, 0.0)
        each.own(P[3], WRONG, 0.0)
        names = sorted(map(str, right))[:4]
        more = {5: " and 1 more", 7: " and 3 more"}.get(num_right, "")
        words = f"its canary gave {WRONG}; {', '.join(names)}{more} gave {RIGHT}"
        assert each.verdict_alone(P[3]) == Verdict("faulty", words)


def test_a_canary_whose_answer_comes_after_one_of_its_nodes_left_does_not_count() -> None:
    for gone in (P[1], D[1]):
        each = ballot(2, 2)
        each.left(gone)
        each.canary(P[1], D[1], WRONG)
        assert each.verdict(P[1], D[1]) == Verdict("untried") and each.wanted(0.0) == []
        each.canary(P[0], D[0], RIGHT)
        each.own(P[0], RIGHT, 0.0)
        each.own(D[0], RIGHT, 0.0)
        assert each.verdict(P[0], D[0]) == Verdict("ready") and each.wanted(0.0) == []


def test_an_own_answer_that_changes_is_counted_anew() -> None:
    each = ballot(0, 1)
    each.own(D[0], WRONG, 0.0)
    each.own(D[0], RIGHT, 1.0)
    assert each.verdict_alone(D[0]) == Verdict("ready")


def test_a_node_that_leaves_is_asked_no_more_and_its_answers_count_no_more() -> None:
    each = ballot(1, 2)
    each.left(P[3])  # was never here
    each.canary(P[0], D[0], RIGHT)
    each.unable(D[0], "no memory", 0.0)
    each.left(D[0])
    assert each.verdict(P[0], D[0]).state == "untried" and each.wanted(1e9) == []
    each.own(D[0], WRONG, 0.0)  # of a node that is gone
    each.joined(D[0], can_compute=True)
    each.canary(P[0], D[0], RIGHT)
    assert each.wanted(0.0) == [D[0]] and each.verdict_alone(D[0]).state == "untried"
    each.own(D[0], WRONG, 0.0)
    assert each.verdict_alone(D[0]).state != "untried"
    each.left(D[0])
    assert each.verdict_alone(D[0]).state == "untried"


def test_answers_agree_from_their_first_tie_on() -> None:
    near = says(1, 2, 3, 4, second=(Rival(8, GAP / 2),))
    other = says(1, 8, 8, 8, second=(Rival(2, GAP / 3),))
    each = ballot(1, 1)
    each.canary(P[0], D[0], near)
    each.own(D[0], other, 0.0)
    assert states(each, 1, 1) == [["ready"]]
    each.own(D[0], says(1, 8, 8, 8, second=(Rival(2, GAP),)), 0.0)
    assert states(each, 1, 1) == [["faulty"]], "a gap is too much, a little less is a tie"
    sure = says(1, 8, 8, 8)
    each.own(D[0], sure, 0.0)
    assert states(each, 1, 1) == [["faulty"]], "both answers must have a tie there"
    each.own(D[0], says(1, 2), 0.0)
    assert states(each, 1, 1) == [["faulty"]], "a shorter answer is not a tie"
    each.own(D[0], says(1, 9, 8, 8, second=(Rival(2, GAP / 3),)), 0.0)
    assert states(each, 1, 1) == [["faulty"]], "a tie of other tokens is none"


def test_words_name_the_tokens_of_an_answer_or_that_there_are_none() -> None:
    assert (str(RIGHT), str(says())) == ("1 2 3 4", "no token")


def test_a_token_that_is_no_rival_is_at_least_as_far_away_as_the_last_one() -> None:
    answer = Answer((1, 2, 3), ((Rival(5, 0.5), Rival(6, 2.0)), (), (Rival(5, 0.25),)))
    assert [answer.distance(0, token) for token in (5, 6, 7)] == [0.5, 2.0, 2.0]
    assert answer.distance(1, 5) == math.inf and answer.distance(2, 7) == 0.25


def test_pairs_that_share_a_node_are_not_independent_witnesses() -> None:
    assert num_independent([]) == 0
    assert num_independent([(P[0], D[0]), (P[0], D[1])]) == 1
    assert num_independent([(P[0], D[0]), (D[0],)]) == 1
    assert num_independent([(P[0], D[0]), (D[0],), (P[0],)]) == 2
    assert num_independent([(P[0], D[0]), (P[0], D[1]), (P[1], D[0])]) == 2
    assert num_independent([(), (P[0], D[0])]) == 2


# Any order of events, with a minority of faulty nodes
# ----------------------------------------------------


@dataclass
class World:
    """Nodes and their answers.

    The canary of a `bad` pair is wrong. So are the canaries of all pairs of a `bad` node, and its own answer unless it
    is in `sound_alone`.
    """

    bad: dict[Voter | tuple[Voter, Voter], Answer]
    sound_alone: set[Voter]
    nodes: list[Voter] = field(default_factory=list)
    ballot: Ballot = field(default_factory=lambda: Ballot(GAP))
    now: float = 0.0

    def alone(self, node: Voter) -> Answer:
        return RIGHT if node in self.sound_alone else self.bad.get(node, RIGHT)

    def together(self, prefill: Voter, decode: Voter) -> Answer:
        return self.bad.get(decode) or self.bad.get(prefill) or self.bad.get((prefill, decode)) or RIGHT

    def is_minority(self) -> bool:
        """Return whether there are fewer faults than sound nodes."""
        here = [each for each in self.bad if set(each if each in self.pairs() else (each,)) <= set(self.nodes)]
        return len(here) < len(set(self.nodes) - self.bad.keys())

    def pairs(self) -> list[tuple[Voter, Voter]]:
        """Return all pairs of present nodes."""
        return [(p, d) for p in self.nodes for d in self.nodes if (p.role, d.role) == ("prefill", "decode")]

    def settle(self) -> None:
        """Let every pair answer its canary, and every node that is asked compute alone."""
        for _ in range(4):
            for pair in self.pairs():
                self.ballot.canary(*pair, self.together(*pair))
            for voter in self.ballot.wanted(self.now):
                self.ballot.own(voter, self.alone(voter), self.now)
            self.now += RETRY_S

    def check(self) -> None:
        """Assert that every good pair is ready and every other one is faulty."""
        for pair in self.pairs():
            verdict = self.ballot.verdict(*pair)
            assert verdict.state == ("ready" if self.together(*pair) == RIGHT else "faulty"), (pair, verdict, self)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_minority_of_faulty_nodes_never_prevails(data: st.DataObject) -> None:
    """Nodes join, answer and leave in any order. At rest every good pair is ready and every other one faulty."""
    nodes = P[: data.draw(st.integers(1, 4))] + D[: data.draw(st.integers(1, 4))]
    wrong = data.draw(st.permutations([WRONG, OTHER, says(5, 5, 5, 5), says(1, 2, 3, 5)]))
    num_bad = data.draw(st.integers(0, (len(nodes) - 1) // 2))
    bad = dict(zip(data.draw(st.permutations(_breakable(nodes)))[:num_bad], wrong, strict=False))
    world = World(bad, {node for node in nodes if node in bad and data.draw(st.booleans())})
    for node in data.draw(st.permutations(nodes)):
        world.nodes.append(node)
        world.ballot.joined(node, can_compute=True)
        for _ in range(data.draw(st.integers(0, 4))):
            if world.pairs() and data.draw(st.booleans()):
                pair = data.draw(st.sampled_from(world.pairs()))
                world.ballot.canary(*pair, world.together(*pair))
            elif wanted := world.ballot.wanted(world.now):
                voter = data.draw(st.sampled_from(wanted))
                world.ballot.own(voter, world.alone(voter), world.now)
            world.now += data.draw(st.sampled_from([0.1, RETRY_S]))
    if not world.is_minority():
        return
    world.settle()
    world.check()
    for node in data.draw(st.permutations(nodes))[: data.draw(st.integers(0, len(nodes)))]:
        world.ballot.left(node)
        world.nodes.remove(node)
        if not world.is_minority():
            return
        world.settle()
        world.check()
    for each in list(world.bad):  # repaired
        del world.bad[each]
        world.settle()
        world.check()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nodes_that_are_wrong_in_the_same_way_lose_to_a_majority_that_has_answered(data: st.DataObject) -> None:
    """Several hosts may have the same bad build, for example."""
    nodes = P[: data.draw(st.integers(1, 4))] + D[: data.draw(st.integers(1, 4))]
    bad = data.draw(st.permutations(nodes))[: data.draw(st.integers(0, (len(nodes) - 1) // 2))]
    world = World(dict.fromkeys(bad, WRONG), set(), nodes)
    for node in nodes:
        world.ballot.joined(node, can_compute=True)
    events = [(node,) for node in nodes] + world.pairs()
    for event in data.draw(st.permutations(events)):
        if len(event) == 1:
            world.ballot.own(event[0], world.alone(event[0]), 0.0)
        else:
            world.ballot.canary(*event, world.together(*event))
    world.check()


def _breakable(nodes: list[Voter]) -> list[Voter | tuple[Voter, Voter]]:
    """Return what can be faulty: each node, and each pair (the connection between two good nodes)."""
    return [*nodes, *((p, d) for p in nodes for d in nodes if (p.role, d.role) == ("prefill", "decode"))]
