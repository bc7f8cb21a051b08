"""The specification of the choice of experts. tests/engine/layers/test_moe.py compares whole layers with a formula."""

from __future__ import annotations

import torch

from baton.kernels.experts.routes import Routing, routes_ref, shares_of

UNIT = torch.eye(6)


def test_of_equal_scores_and_of_equal_groups_the_first_are_chosen() -> None:
    zeros = torch.zeros(2, 6)
    assert routes_ref(zeros, UNIT, None, None, Routing(4)).chosen.tolist() == [[0, 1, 2, 3]] * 2
    routing = Routing(3, num_groups=3, num_active_groups=2)
    assert routes_ref(zeros, UNIT, None, None, routing).chosen.tolist() == [[0, 1, 2]] * 2


def test_a_bias_changes_the_choice_and_no_share() -> None:
    x, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0, 0.0, 0.0]]), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.9])
    routes = routes_ref(x, UNIT, None, bias, Routing(2, "sigmoid"))
    assert routes.chosen.tolist() == [[4, 5]] and routes.shares.tolist() == [[0.5, 0.5]]


def test_a_group_is_ranked_by_its_largest_scores() -> None:
    """Group 0 has the largest score, group 1 the two that have the largest sum."""
    x = torch.tensor([[4.0, -9.0, 2.0, 1.9, 1.0, 0.9]])
    for num_ranking, chosen in ((1, [0, 1]), (2, [2, 3])):
        routing = Routing(2, "sigmoid", num_groups=3, num_active_groups=1, num_ranking=num_ranking)
        assert routes_ref(x, UNIT, None, None, routing).chosen.tolist() == [chosen]


def test_shares_sum_to_one_times_scaling() -> None:
    x, bias = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(6)
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        shares = routes_ref(x, UNIT, bias, bias, Routing(3, scoring, sums_to_one=True, scaling=2.5)).shares
        torch.testing.assert_close(shares.sum(1), torch.full((5,), 2.5))


def test_experts_that_are_given_have_the_shares_of_their_scores() -> None:
    x, given = torch.tensor([[3.0, -2.0, 1.0, 0.0, 0.0, 0.0]]), torch.tensor([[4, 1]])
    chosen, shares = shares_of(x, UNIT, given, Routing(2, "sqrtsoftplus"))
    assert torch.equal(chosen, given)
    torch.testing.assert_close(shares, torch.tensor([[0.0, -2.0]]).exp().log1p().sqrt())
