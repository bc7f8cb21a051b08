"""The vote on canaries: which answer is the group's, and which pairs and nodes are ready, undecided or faulty."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import num_examples

from baton.router.health.verdicts import READY, UNTRIED, Answer, Token, Verdict, Votes, agree, text

Pair = tuple[str, str]


def says(*ids: int) -> Answer:
    """Return an answer without ties."""
    return tuple(Token(token_id) for token_id in ids)


RIGHT, WRONG, OTHER = says(1, 2, 3, 4), says(1, 9, 9, 9), says(7, 7, 7, 7)


def votes(num_nodes: int, **answers: Answer) -> Votes:
    """Return the votes of nodes by name."""
    return Votes(answers, num_nodes)


def test_a_pair_is_untried_until_its_canary_and_both_its_nodes_alone_have_answered() -> None:
    all_right = votes(2, p0=RIGHT, d0=RIGHT)
    for answer, own in ((None, (RIGHT, RIGHT)), (RIGHT, (None, RIGHT)), (RIGHT, (RIGHT, None)), (None, (None, None))):
        assert all_right.verdict(answer, {"p0": own[0], "d0": own[1]}) == UNTRIED
    assert all_right.verdict(RIGHT, {"p0": RIGHT, "d0": RIGHT}) == READY
    assert votes(1, p0=RIGHT).verdict(RIGHT, {"p0": RIGHT}) == READY, "its decode node is too old to compute alone"


def test_a_canary_is_compared_with_what_either_of_its_nodes_computes_alone() -> None:
    for name in ("p0", "d0"):
        own = {"p0": WRONG, "d0": WRONG, name: RIGHT}
        verdict = votes(2, **own).verdict(WRONG, own)
        assert verdict == Verdict("faulty", f"its canary gave 1 9 9 9, but {name} alone computes 1 2 3 4")


def test_two_nodes_that_disagree_are_undecided_until_a_third_has_voted() -> None:
    two = votes(2, d0=RIGHT, d1=WRONG)
    words = "nodes disagree, and nobody can tell yet who is right: d0 gave 1 2 3 4; d1 gave 1 9 9 9"
    assert two.verdict(RIGHT, {}) == two.verdict(WRONG, {}) == Verdict("undecided", words)
    three = votes(3, d0=RIGHT, d1=WRONG, p0=RIGHT)
    assert three.verdict(RIGHT, {}) == READY
    words = "its canary gave 1 9 9 9, but most nodes do not: d0, p0 gave 1 2 3 4; d1 gave 1 9 9 9"
    assert three.verdict(WRONG, {}) == Verdict("faulty", words)


def test_nobody_is_accused_by_half_of_all_nodes_or_less() -> None:
    """Nodes that have not answered may give the other answer."""
    for num_nodes, state in ((3, "faulty"), (4, "undecided"), (5, "undecided")):
        assert votes(num_nodes, p0=RIGHT, p1=RIGHT, d0=WRONG).verdict(WRONG, {}).state == state
        assert votes(num_nodes, p0=RIGHT, p1=RIGHT, d0=WRONG).verdict(RIGHT, {}) == READY


def test_an_answer_is_the_groups_only_if_more_than_half_of_the_votes_agree_with_it() -> None:
    for answers in ((RIGHT, RIGHT, WRONG, WRONG), (RIGHT, RIGHT, WRONG, OTHER), (RIGHT, WRONG, OTHER)):
        given = votes(len(answers), **{f"d{index}": answer for index, answer in enumerate(answers)})
        assert {given.verdict(answer, {}).state for answer in answers} == {"undecided"}, answers


def test_two_pairs_against_two_by_a_prefill_node_that_is_wrong_in_all_it_does() -> None:
    own = {"p0": WRONG, "p1": RIGHT, "d0": RIGHT, "d1": RIGHT}
    counted = votes(4, **own)
    for decode in ("d0", "d1"):
        assert counted.verdict(WRONG, {"p0": WRONG, decode: RIGHT}).state == "faulty"
        assert counted.verdict(RIGHT, {"p1": RIGHT, decode: RIGHT}) == READY


def test_a_connection_that_spoils_pages_makes_one_pair_faulty() -> None:
    counted = votes(2, p0=RIGHT, d0=RIGHT)
    assert counted.verdict(WRONG, {"p0": RIGHT, "d0": RIGHT}).state == "faulty"


def test_a_single_vote_decides_nothing_while_others_are_about_to_vote() -> None:
    assert Votes({"d1": WRONG}, 3, 1).verdict(WRONG, {}) == UNTRIED
    assert Votes({"d1": WRONG}, 3, 0).verdict(WRONG, {}) == READY, "the others cannot answer"
    assert Votes({"d1": WRONG, "d0": WRONG}, 3, 1).verdict(WRONG, {}) == READY


def test_votes_are_unanimous_if_all_agree() -> None:
    assert votes(0).are_unanimous and votes(1, d0=RIGHT).are_unanimous and votes(3, d0=RIGHT, d1=RIGHT).are_unanimous
    assert not votes(3, d0=RIGHT, d1=RIGHT, d2=WRONG).are_unanimous


def test_answers_agree_from_their_first_tie_on() -> None:
    near, other = (Token(1), Token(2, frozenset({2, 8})), Token(3)), (Token(1), Token(8, frozenset({8, 2})), Token(5))
    assert agree(near, other) and agree(other, near) and agree(near, near)
    assert not agree(near, says(1, 8, 5)), "both answers must have a tie there"
    assert not agree(says(1, 2, 3), other)
    assert not agree(near, (Token(1), Token(9, frozenset({2, 9})), Token(5))), "a tie of other tokens is none"
    assert not agree(near, near[:2]) and not agree(near, ()), "a shorter answer is not a tie"
    assert agree(near, (Token(1), Token(8, None), Token(5))), "nearly all tokens were ties"


def test_answers_that_agree_by_a_tie_count_as_one_answer() -> None:
    near, other = (Token(2, frozenset({2, 8})),), (Token(8, frozenset({2, 8})),)
    counted = votes(3, p0=near, d0=other, d1=says(5))
    assert counted.verdict(other, {"p0": near, "d0": other}) == READY
    assert counted.verdict(says(5), {}).state == "faulty"


def test_a_verdict_names_four_nodes_and_four_answers_and_counts_the_others() -> None:
    many = {f"d{index}": RIGHT for index in range(9)} | {f"p{index}": says(index) for index in range(5)}
    words = votes(14, **many).verdict(OTHER, {}).words
    camps = "d0, d1, d2, d3 and 5 more gave 1 2 3 4; p0 gave 0; p1 gave 1; p2 gave 2 and 2 more"
    assert words == f"its canary gave 7 7 7 7, but most nodes do not: {camps}"
    assert text(()) == "no token"


# Nodes and connections that may be faulty
# ----------------------------------------


@settings(max_examples=num_examples(200), deadline=None)
@given(st.data())
def test_a_minority_of_faulty_nodes_never_prevails(data: st.DataObject) -> None:
    """Answers come in any order. No pair of good nodes is ever faulty; in the end it is ready, and all others are
    faulty."""
    prefills = [f"p{index}" for index in range(data.draw(st.integers(1, 5)))]
    decodes = [f"d{index}" for index in range(data.draw(st.integers(1, 5)))]
    nodes, pairs = prefills + decodes, [(p, d) for p in prefills for d in decodes]
    kinds = data.draw(st.sampled_from([(WRONG,), (WRONG, OTHER, says(5), says(1, 2, 3, 5))]))
    num_bad = data.draw(st.integers(0, (len(nodes) - 1) // 2))
    bad: dict[str | Pair, Answer] = {
        node: data.draw(st.sampled_from(kinds)) for node in data.draw(st.permutations(nodes))[:num_bad]
    }
    bad |= {pair: WRONG for pair in pairs if data.draw(st.integers(0, 9)) == 0}
    alone_is_right = {node for node in nodes if data.draw(st.booleans())}
    truth: dict[str | Pair, Answer] = {
        node: RIGHT if node in alone_is_right else bad.get(node, RIGHT) for node in nodes
    }
    truth |= {(p, d): bad.get(d) or bad.get(p) or bad.get((p, d)) or RIGHT for p, d in pairs}
    given_yet: dict[str | Pair, Answer] = {}

    def state(pair: Pair) -> str:
        own = {node: given_yet.get(node) for node in pair}
        counted = Votes({node: given_yet[node] for node in nodes if node in given_yet}, len(nodes))
        return counted.verdict(given_yet.get(pair), own).state

    def is_good(pair: Pair) -> bool:
        return truth[pair] == truth[pair[0]] == truth[pair[1]] == RIGHT

    for each in data.draw(st.permutations([*nodes, *pairs])):
        given_yet[each] = truth[each]
        assert all(state(pair) != "faulty" for pair in pairs if is_good(pair)), (given_yet, bad)
    assert {pair: state(pair) for pair in pairs} == {pair: "ready" if is_good(pair) else "faulty" for pair in pairs}
