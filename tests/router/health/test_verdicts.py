"""The vote on canaries: which answer becomes the group's, which pairs are faulty, which nodes are asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.health.verdicts import Answer, Ballot, Rival, Verdict, Voter

GAP = 1e-4
P = [Voter("prefill", f"p{i}", b"p%d" % i) for i in range(5)]
D = [Voter("decode", f"d{i}", b"d%d" % i) for i in range(5)]


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
    return [[ballot.verdict((p, d)).state for d in D[:num_decode]] for p in P[:num_prefill]]


def test_a_single_pair_waits_for_the_answer_of_its_decode_node_alone() -> None:
    each = ballot(1, 1)
    assert each.wanted() == [] and each.verdict((P[0], D[0])).state == "untried"
    each.take((P[0], D[0]), RIGHT)
    verdict = each.verdict((P[0], D[0]))
    assert (verdict.state, each.wanted()) == ("unconfirmed", [D[0]])
    assert verdict.words == "its canary gave 1 2 3 4, which decode node d0 has not computed alone yet: it is asked to"
    each.take((D[0],), RIGHT)
    assert each.verdict((P[0], D[0])).state == "ready"
    assert each.wanted() == [P[0]], "d0 may be wrong in both answers, so another node is asked"
    each.take((P[0],), RIGHT)
    assert each.wanted() == []


def test_a_prefill_node_alone_does_not_confirm_its_own_pair() -> None:
    """Its KV may be wrong in both answers."""
    each = ballot(1, 1)
    each.take((P[0], D[0]), WRONG)
    each.take((P[0],), WRONG)
    assert each.verdict((P[0], D[0])).state == "unconfirmed" and each.wanted() == [D[0]]


def test_a_canary_is_compared_with_what_either_of_its_nodes_computes_alone() -> None:
    for node in (P[0], D[0]):
        each = ballot(1, 1)
        each.take((P[0], D[0]), WRONG)
        each.take((node,), RIGHT)
        verdict = each.verdict((P[0], D[0]))
        assert verdict.state == "faulty" and f"but {node} alone computes {RIGHT}" in verdict.words


def test_if_the_two_answers_of_a_single_pair_differ_the_verdict_names_both() -> None:
    each = ballot(1, 1)
    each.take((P[0], D[0]), WRONG)
    each.take((D[0],), RIGHT)
    verdict = each.verdict((P[0], D[0]))
    assert verdict.state == "faulty"
    assert verdict.words == "its canary gave 1 9 9 9, but decode node d0 alone computes 1 2 3 4"


def test_a_node_alone_confirms_the_pairs_of_others() -> None:
    each = ballot(2, 2)
    each.take((P[0], D[0]), RIGHT)
    each.take((P[1], D[1]), RIGHT)
    assert states(each, 2, 2) == [["unconfirmed", "untried"], ["untried", "unconfirmed"]] and each.wanted() == D[:2]
    each.take((D[0],), RIGHT)
    assert states(each, 2, 2) == [["ready", "untried"], ["untried", "ready"]]
    each.take((D[1],), RIGHT)
    assert each.wanted() == [], "two votes suffice"


def test_pairs_are_no_votes_however_many_agree() -> None:
    """A prefill node with wrong KV makes every decode node give the same wrong answer."""
    each = ballot(1, 3)
    for decode in D[:3]:
        each.take((P[0], decode), WRONG)
    assert states(each, 1, 3) == [["unconfirmed"] * 3] and each.wanted() == D[:3]
    for decode in D[:3]:
        each.take((decode,), RIGHT)
    assert states(each, 1, 3) == [["faulty"] * 3]


def test_a_connection_that_spoils_pages_makes_one_pair_faulty() -> None:
    each = ballot(2, 2)
    for prefill, decode in ((P[0], D[0]), (P[0], D[1]), (P[1], D[0])):
        each.take((prefill, decode), RIGHT)
    each.take((P[1], D[1]), WRONG)
    assert set(each.wanted()) == {*P[:2], *D[:2]}
    each.take((D[0],), RIGHT)
    assert states(each, 2, 2) == [["ready", "ready"], ["ready", "undecided"]], "one node accuses nobody"
    each.take((P[0],), RIGHT)
    assert states(each, 2, 2) == [["ready", "ready"], ["ready", "undecided"]], "nor does half of all nodes"
    each.take((P[1],), RIGHT)
    assert states(each, 2, 2) == [["ready", "ready"], ["ready", "faulty"]]
    words = "its canary gave 1 9 9 9, but prefill node p1 alone computes 1 2 3 4"
    assert each.verdict((P[1], D[1])).words == words


def test_two_pairs_against_two_by_a_prefill_node() -> None:
    """The answers of the faulty pairs come first."""
    each = ballot(2, 2)
    for decode in D[:2]:
        each.take((P[0], decode), WRONG)
    for decode in D[:2]:
        each.take((P[1], decode), RIGHT)
    assert set(each.wanted()) == {*P[:2], *D[:2]}
    each.take((D[1],), RIGHT)
    assert states(each, 2, 2) == [["undecided", "faulty"], ["ready", "ready"]], "d1 contradicts its own pair"
    assert "nobody can tell yet who is right" in each.verdict((P[0], D[0])).words
    each.take((P[0],), WRONG)
    assert states(each, 2, 2) == [["undecided", "faulty"], ["undecided", "undecided"]]
    each.take((P[1],), RIGHT)
    assert states(each, 2, 2) == [["undecided", "faulty"], ["ready", "ready"]]
    each.take((D[0],), RIGHT)
    assert states(each, 2, 2) == [["faulty"] * 2, ["ready"] * 2]
    assert each.verdict((P[0], D[0])).words == "its canary gave 1 9 9 9, but decode node d0 alone computes 1 2 3 4"


def test_two_pairs_against_two_by_a_decode_node_that_is_wrong_in_all_it_does() -> None:
    """Its canaries equal its own answer. The own answers of the prefill nodes decide."""
    each = ballot(2, 2)
    for prefill in P[:2]:
        each.take((prefill, D[0]), WRONG)
        each.take((prefill, D[1]), RIGHT)
    each.take((D[0],), WRONG)
    each.take((D[1],), RIGHT)
    assert states(each, 2, 2) == [["undecided"] * 2] * 2
    words = each.verdict((P[0], D[0])).words
    assert "decode node d0 gave 1 9 9 9" in words and "decode node d1 gave 1 2 3 4" in words
    assert each.wanted() == [*P[:2], D[0], D[1]]
    each.take((P[0],), RIGHT)
    assert states(each, 2, 2) == [["faulty", "ready"], ["undecided", "ready"]]
    each.take((P[1],), RIGHT)
    assert states(each, 2, 2) == [["faulty", "ready"]] * 2


def test_a_good_node_that_joins_beside_a_faulty_one_is_ready_once_a_third_has_voted() -> None:
    """The first decode node is always wrong, so that a good one that joins later looks wrong at first."""
    each = ballot(1, 1)
    each.take((P[0], D[0]), WRONG)
    each.take((D[0],), WRONG)
    assert states(each, 1, 1) == [["ready"]], "no node here could contradict it"
    each.joined(D[1], can_compute=True)
    each.take((P[0], D[1]), RIGHT)
    assert states(each, 1, 2) == [["ready", "undecided"]] and each.wanted() == [P[0], D[1]]
    each.take((D[1],), RIGHT)
    assert states(each, 1, 2) == [["undecided", "undecided"]]
    each.take((P[0],), RIGHT)
    assert states(each, 1, 2) == [["faulty", "ready"]]


def test_a_faulty_pair_that_joins_later_condemns_no_good_pair() -> None:
    each = ballot(2, 1)
    each.take((P[0], D[0]), RIGHT)
    each.take((D[0],), RIGHT)
    each.take((P[0],), RIGHT)
    each.take((P[1], D[0]), WRONG)
    assert states(each, 2, 1) == [["ready"], ["faulty"]] and each.wanted() == [P[1]]
    each.joined(D[1], can_compute=True)
    each.take((P[0], D[1]), OTHER)
    assert [each.verdict((P[0], decode)).state for decode in D[:2]] == ["ready", "faulty"]


def test_a_pair_that_goes_bad_later_and_recovers() -> None:
    each = ballot(2, 2)
    for prefill in P[:2]:
        for decode in D[:2]:
            each.take((prefill, decode), RIGHT)
    for decode in D[:2]:
        each.take((decode,), RIGHT)
    each.take((P[0], D[0]), WRONG)
    assert states(each, 2, 2) == [["faulty", "ready"], ["ready", "ready"]]
    each.take((P[0], D[0]), RIGHT)
    assert states(each, 2, 2) == [["ready", "ready"]] * 2


def test_a_node_in_the_minority_is_asked_again() -> None:
    each = ballot(2, 2)
    for prefill in P[:2]:
        for decode in D[:2]:
            each.take((prefill, decode), RIGHT if decode is D[0] else OTHER)
    for voter, answer in ((P[0], RIGHT), (P[1], RIGHT), (D[0], RIGHT), (D[1], OTHER)):
        each.take((voter,), answer)
    assert states(each, 2, 2) == [["ready", "faulty"]] * 2 and each.wanted() == [D[1]]
    for prefill in P[:2]:
        each.take((prefill, D[1]), RIGHT)
    assert states(each, 2, 2) == [["ready", "faulty"]] * 2, "its own answer still differs"
    each.take((D[1],), RIGHT)
    assert states(each, 2, 2) == [["ready", "ready"]] * 2 and each.wanted() == []


def test_answers_of_a_node_that_leaves_are_removed_unless_two_nodes_agreed() -> None:
    each = ballot(2, 2)
    each.take((P[0], D[0]), RIGHT)
    each.take((D[0],), RIGHT)
    each.take((D[1],), RIGHT)
    for node in (P[1], *D[:2]):
        each.left(node)
    assert states(each, 2, 2) == [["untried"] * 2] * 2
    each.joined(D[2], can_compute=True)
    each.take((P[0], D[2]), WRONG)
    assert each.verdict((P[0], D[2])).state == "undecided"
    assert "nodes that were here before gave 1 2 3 4" in each.verdict((P[0], D[2])).words
    each.take((D[2],), WRONG)
    assert each.verdict((P[0], D[2])).state == "undecided"
    each.take((P[0],), WRONG)
    assert each.verdict((P[0], D[2])).state == "ready", "two present nodes outvote the remembered answer"


def test_a_remembered_answer_is_no_further_vote_beside_the_nodes_that_gave_it() -> None:
    each = ballot(2, 2)
    for node, answer in ((P[0], RIGHT), (P[1], RIGHT), (D[0], WRONG), (D[1], WRONG)):
        each.take((node,), answer)
    assert [each.verdict((node,)).state for node in (*P[:2], *D[:2])] == ["undecided"] * 4


def test_the_remembered_answer_is_a_vote_beside_the_one_node_that_still_gives_it() -> None:
    each = ballot(1, 3)
    each.left(D[2])
    each.take((P[0],), RIGHT)
    each.take((D[0],), RIGHT)
    each.left(D[0])
    each.joined(D[2], can_compute=True)
    each.take((D[2],), WRONG)
    assert each.verdict((P[0],)).state == "ready"
    assert each.verdict((D[2],)).state == "undecided", "two votes of four: d1 has not answered"
    each.left(D[1])
    assert each.verdict((D[2],)).state == "faulty", "two votes of three"


def test_an_answer_of_one_node_is_not_remembered() -> None:
    each = ballot(2, 2)
    each.take((P[0], D[0]), WRONG)
    each.take((D[0],), WRONG)
    each.left(P[0])
    each.left(D[0])
    each.take((P[1], D[1]), RIGHT)
    each.take((D[1],), RIGHT)
    assert each.verdict((P[1], D[1])).state == "ready"


def test_pairs_of_decode_nodes_that_cannot_compute_alone_are_compared_with_prefill_nodes() -> None:
    each = Ballot(GAP)
    for voter in (*P[:2], *D[:2]):
        each.joined(voter, can_compute=voter in P)
    each.take((P[0], D[0]), WRONG)
    assert each.verdict((P[0], D[0])).words.endswith("which prefill node p0 has not computed alone yet: it is asked to")
    assert each.wanted() == [P[0]]
    each.take((P[0],), WRONG)
    assert each.verdict((P[0], D[0])).state == "ready"
    each.take((P[1], D[0]), RIGHT)
    each.take((P[1], D[1]), RIGHT)
    assert states(each, 2, 2) == [["ready", "untried"], ["undecided", "undecided"]]
    each.take((P[1],), RIGHT)
    assert states(each, 2, 2) == [["undecided", "untried"], ["undecided", "undecided"]], "no other node can decide"
    each.left(P[0])
    assert [each.verdict((P[1], decode)).state for decode in D[:2]] == ["ready"] * 2


def test_the_vote_does_not_wait_for_a_node_that_cannot_answer() -> None:
    each = ballot(1, 2)
    each.take((P[0], D[0]), RIGHT)
    each.take((P[0], D[1]), WRONG)
    each.take((D[0],), RIGHT)
    for voter in (P[0], D[1]):
        each.unable(voter, "its disk is full")
    assert states(each, 1, 2) == [["ready", "undecided"]], "the pair out of service is not accused by one node"
    assert each.wanted() == [P[0], D[1]]
    each.take((D[1],), WRONG)
    assert states(each, 1, 2) == [["undecided", "undecided"]]
    each.take((P[0],), RIGHT)
    assert states(each, 1, 2) == [["ready", "faulty"]]


def test_a_pair_whose_decode_node_cannot_answer_is_not_ready() -> None:
    each = ballot(1, 1)
    each.take((P[0], D[0]), RIGHT)
    each.unable(D[0], "it has no room")
    assert each.verdict((P[0], D[0])).state == "unconfirmed"
    assert "not computed alone yet: it has no room" in each.verdict((P[0], D[0])).words
    each.take((D[0],), RIGHT)
    assert each.verdict((P[0], D[0])).state == "ready"


def test_the_verdict_on_a_node_that_computes_alone() -> None:
    each = ballot(2, 2)
    assert each.verdict((D[0],)) == Verdict("untried")
    each.take((D[0],), RIGHT)
    assert each.verdict((D[0],)) == Verdict("ready") and each.verdict((D[1],)) == Verdict("untried")
    each.take((D[1],), WRONG)
    words = f"decode node d0 gave {RIGHT}; decode node d1 gave {WRONG}"
    undecided = Verdict("undecided", f"nodes disagree, and nobody can tell yet who is right: {words}")
    assert each.verdict((D[0],)) == each.verdict((D[1],)) == undecided
    each.take((P[0],), RIGHT)
    assert each.verdict((D[0],)) == Verdict("ready") and each.verdict((D[1],)).state == "undecided"
    each.take((P[1],), RIGHT)
    names = "decode node d0, prefill node p0, prefill node p1"
    faulty = Verdict("faulty", f"its canary gave {WRONG}; {names} gave {RIGHT}")
    assert each.verdict((D[0],)) == Verdict("ready") and each.verdict((D[1],)) == faulty
    each.take((D[1],), says(1, 2, 3))  # ends too early
    assert each.verdict((D[1],)).state == "faulty"


def test_answers_of_equal_weight_are_undecided_even_when_nobody_is_left_to_ask() -> None:
    each = ballot(0, 2)
    each.take((D[0],), RIGHT)
    each.take((D[1],), WRONG)
    assert [each.verdict((node,)).state for node in D[:2]] == ["undecided"] * 2


def test_one_prefill_node_is_asked_to_confirm_an_answer_not_all_of_them() -> None:
    each = ballot(3, 1)
    for prefill in P[:3]:
        each.take((prefill, D[0]), RIGHT)
    each.unable(D[0], "no memory")
    assert each.wanted() == [D[0], P[0]], "also if the decode node does not answer"
    each.take((D[0],), RIGHT)
    assert each.wanted() == [P[0]]
    each.unable(P[0], "no memory")
    assert each.wanted() == [P[1]]


def test_a_verdict_names_four_nodes_and_counts_the_others() -> None:
    for num_right in (5, 6, 7):
        each, right = ballot(4, 4), [*D[:4], *P][:num_right]
        for node in right:
            each.take((node,), RIGHT)
        each.take((P[3],), WRONG)
        names = sorted(map(str, right))[:4]
        words = f"its canary gave {WRONG}; {', '.join(names)} and {num_right - 4} more gave {RIGHT}"
        assert each.verdict((P[3],)) == Verdict("faulty", words)


def test_a_canary_whose_answer_comes_after_one_of_its_nodes_left_does_not_count() -> None:
    for gone in (P[1], D[1]):
        each = ballot(2, 2)
        each.left(gone)
        each.take((P[1], D[1]), WRONG)
        assert each.verdict((P[1], D[1])) == Verdict("untried") and each.wanted() == []
        each.take((P[0], D[0]), RIGHT)
        each.take((P[0],), RIGHT)
        each.take((D[0],), RIGHT)
        assert each.verdict((P[0], D[0])) == Verdict("ready") and each.wanted() == []


def test_an_own_answer_that_changes_is_counted_anew() -> None:
    each = ballot(0, 1)
    each.take((D[0],), WRONG)
    each.take((D[0],), RIGHT)
    assert each.verdict((D[0],)) == Verdict("ready")


def test_a_node_that_leaves_is_asked_no_more_and_its_answers_count_no_more() -> None:
    each = ballot(1, 2)
    each.left(P[3])  # was never here
    each.take((P[0], D[0]), RIGHT)
    each.unable(D[0], "no memory")
    each.left(D[0])
    assert each.verdict((P[0], D[0])).state == "untried" and each.wanted() == []
    each.take((D[0],), WRONG)  # of a node that is gone
    each.unable(D[0], "no memory")
    each.joined(D[0], can_compute=True)
    each.take((P[0], D[0]), RIGHT)
    assert each.wanted() == [D[0]] and each.verdict((D[0],)).state == "untried"
    each.take((D[0],), WRONG)
    assert each.verdict((D[0],)).state != "untried"
    each.left(D[0])
    assert each.verdict((D[0],)).state == "untried"


def test_answers_agree_from_their_first_tie_on() -> None:
    near = says(1, 2, 3, 4, second=(Rival(8, GAP / 2),))
    other = says(1, 8, 8, 8, second=(Rival(2, GAP / 3),))
    each = ballot(1, 1)
    each.take((P[0], D[0]), near)
    each.take((D[0],), other)
    assert states(each, 1, 1) == [["ready"]]
    each.take((D[0],), says(1, 8, 8, 8, second=(Rival(2, GAP),)))
    assert states(each, 1, 1) == [["faulty"]], "a gap is too much, a little less is a tie"
    sure = says(1, 8, 8, 8)
    each.take((D[0],), sure)
    assert states(each, 1, 1) == [["faulty"]], "both answers must have a tie there"
    each.take((D[0],), says(1, 2))
    assert states(each, 1, 1) == [["faulty"]], "a shorter answer is not a tie"
    each.take((D[0],), says(1, 9, 8, 8, second=(Rival(2, GAP / 3),)))
    assert states(each, 1, 1) == [["faulty"]], "a tie of other tokens is none"


def test_words_name_the_tokens_of_an_answer_or_that_there_are_none() -> None:
    assert (str(RIGHT), str(says())) == ("1 2 3 4", "no token")


def test_a_token_that_is_no_rival_is_at_least_as_far_away_as_the_last_one() -> None:
    answer = Answer((1, 2, 3), ((Rival(5, 0.5), Rival(6, 2.0)), (), (Rival(5, 0.25),)))
    assert [answer.distance(0, token) for token in (5, 6, 7)] == [0.5, 2.0, 2.0]
    assert answer.distance(1, 5) == math.inf and answer.distance(2, 7) == 0.25


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
                self.ballot.take(pair, self.together(*pair))
            for voter in self.ballot.wanted():
                self.ballot.take((voter,), self.alone(voter))

    def accuses_no_good_pair(self) -> None:
        """Assert that no pair of good nodes is faulty, whoever has answered so far."""
        for prefill, decode in self.pairs():
            if not {prefill, decode, (prefill, decode)} & self.bad.keys():
                assert self.ballot.verdict((prefill, decode)).state != "faulty", (prefill, decode, self)

    def check(self) -> None:
        """Assert that every good pair is ready and every other one is faulty."""
        for pair in self.pairs():
            verdict = self.ballot.verdict(pair)
            assert verdict.state == ("ready" if self.together(*pair) == RIGHT else "faulty"), (pair, verdict, self)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_minority_of_faulty_nodes_never_prevails(data: st.DataObject) -> None:
    """Nodes join, answer and leave in any order. At rest every good pair is ready and every other one faulty."""
    nodes = P[: data.draw(st.integers(1, 5))] + D[: data.draw(st.integers(1, 5))]
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
                world.ballot.take(pair, world.together(*pair))
            elif wanted := world.ballot.wanted():
                voter = data.draw(st.sampled_from(wanted))
                world.ballot.take((voter,), world.alone(voter))
            world.accuses_no_good_pair()
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
    nodes = P[: data.draw(st.integers(1, 5))] + D[: data.draw(st.integers(1, 5))]
    bad = data.draw(st.permutations(nodes))[: data.draw(st.integers(0, (len(nodes) - 1) // 2))]
    world = World(dict.fromkeys(bad, WRONG), set(), nodes)
    for node in nodes:
        world.ballot.joined(node, can_compute=True)
    events = [(node,) for node in nodes] + world.pairs()
    for event in data.draw(st.permutations(events)):
        if len(event) == 1:
            world.ballot.take(event, world.alone(event[0]))
        else:
            world.ballot.take(event, world.together(*event))
    world.check()


def _breakable(nodes: list[Voter]) -> list[Voter | tuple[Voter, Voter]]:
    """Return what can be faulty: each node, and each pair (the connection between two good nodes)."""
    return [*nodes, *((p, d) for p in nodes for d in nodes if (p.role, d.role) == ("prefill", "decode"))]
