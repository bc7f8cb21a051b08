"""The Triton kernels of the choice of experts against kernels/experts/routes.py's specification."""

from __future__ import annotations

import itertools

import pytest
import torch
from thinned import every, thinned
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

from baton.kernels.experts import routes, triton_routes
from baton.kernels.experts.routes import Routing, routes_ref

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp overflows aloud
DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
PLAIN = Routing(4, sums_to_one=True)
GROUPS = Routing(4, num_groups=4, num_active_groups=2)
ROUTINGS = {
    "one": (60, Routing(1)),
    "all": (6, Routing(6, sums_to_one=True)),
    "sum to one": (128, Routing(8, sums_to_one=True)),
    "scaled": (60, PLAIN._replace(scaling=2.5)),
    "sigmoid": (60, PLAIN._replace(scoring="sigmoid", scaling=1.5)),
    "softplus": (60, PLAIN._replace(scoring="sqrtsoftplus", scaling=1.5)),
    "groups": (64, GROUPS),
    "groups of 20": (160, Routing(6, num_groups=8, num_active_groups=3, scaling=16.0)),
    "three groups of two": (6, Routing(2, "sigmoid", num_groups=3, num_active_groups=2, num_ranking=2)),
    "groups of one": (5, GROUPS._replace(num_groups=5, num_active_groups=4)),
    "two of a group": (256, Routing(8, "sigmoid", True, 2.5, num_groups=8, num_active_groups=4, num_ranking=2)),
}


def check(x: Tensor, weight: Tensor, product_bias: Tensor | None, bias: Tensor | None, routing: Routing) -> None:
    assert triton_routes.serves(x, weight, product_bias, bias, routing)
    ours = triton_routes.routes(x, weight, product_bias, bias, routing)
    theirs = routes_ref(x, weight, product_bias, bias, routing)
    assert ours.chosen.dtype == torch.int64 and torch.equal(ours.chosen, theirs.chosen)
    torch.testing.assert_close(ours.shares, theirs.shares, atol=1e-6, rtol=2e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_routes_are_those_of_the_reference(name: str, has_bias: bool) -> None:
    num_experts, routing = ROUTINGS[name]
    weight, bias = random(num_experts, 72, seed=1, scale=0.2), None
    if has_bias:
        bias = random(num_experts, seed=2, scale=0.5)
    check(random(5, 72, dtype=DTYPE), weight, None, bias, routing)


def test_shares_of_given_experts_are_those_of_the_reference() -> None:
    weight, routing = random(60, 72, seed=1, scale=0.2), PLAIN._replace(scoring="sqrtsoftplus", scaling=1.5)
    x, given = random(5, 72, dtype=DTYPE), torch.stack([torch.randperm(60)[:4] for _ in range(5)]).to(DEVICE)
    ours, theirs = (shares(x, weight, given, routing) for shares in (triton_routes.shares_of, routes.shares_of_ref))
    assert torch.equal(ours.chosen, given)
    torch.testing.assert_close(ours.shares, theirs.shares, atol=1e-6, rtol=2e-5)


@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    thinned(itertools.product([1, 17, 70, 515, 2050], DTYPES), lambda i, *_: i in (0, 3, 4, 7) or not IS_INTERPRETED),
)
def test_any_number_of_rows(num_rows: int, dtype: torch.dtype) -> None:
    weight, product_bias = random(32, 200, seed=1, scale=0.1), random(32, seed=2)
    check(random(num_rows, 200, dtype=dtype), weight, product_bias, None, PLAIN)


@pytest.mark.skipif(IS_INTERPRETED, reason="many programs")
@pytest.mark.parametrize("num_rows", [1, 64, 256, 1000, 8192])
@pytest.mark.parametrize("name", ["sum to one", "two of a group"])
def test_sizes_of_large_models(num_rows: int, name: str) -> None:
    num_experts, routing = ROUTINGS[name]
    weight = random(num_experts, 7168, seed=1, scale=0.02)
    bias = random(num_experts, seed=2, scale=0.1) if routing.num_groups > 1 else None
    ours = triton_routes.routes(x := random(num_rows, 7168, dtype=DTYPE), weight, None, bias, routing)
    theirs = routes_ref(x, weight, None, bias, routing)
    is_same = (ours.chosen == theirs.chosen).all(1)  # but for scores that nearly tie
    assert is_same.float().mean() > 0.995
    torch.testing.assert_close(ours.shares[is_same], theirs.shares[is_same], atol=1e-6, rtol=2e-5)


@pytest.mark.parametrize("num_rows", [2, 20 if IS_INTERPRETED else 600])
def test_of_equal_scores_and_of_equal_groups_the_first_are_chosen(num_rows: int) -> None:
    x, weight = torch.zeros(num_rows, 16, dtype=DTYPE, device=DEVICE), random(64, 16)
    for routing in (PLAIN, GROUPS, GROUPS._replace(scoring="sigmoid", num_ranking=2)):
        assert triton_routes.routes(x, weight, None, None, routing).chosen.tolist() == [[0, 1, 2, 3]] * num_rows


@pytest.mark.parametrize("name", every(ROUTINGS, 2))
def test_a_row_that_is_not_a_number_chooses_different_experts_and_changes_no_other_row(name: str) -> None:
    num_experts, routing = ROUTINGS[name]
    x, weight = random(3, 72, dtype=DTYPE), random(num_experts, 72, seed=1, scale=0.2)
    clean = triton_routes.routes(x, weight, None, None, routing)
    x[1] = float("nan")
    ours = triton_routes.routes(x, weight, None, None, routing)
    chosen = ours.chosen[1].tolist()
    assert len(set(chosen)) == len(chosen) and all(0 <= expert < num_experts for expert in chosen)
    for row in (0, 2):
        assert torch.equal(ours.chosen[row], clean.chosen[row]) and torch.equal(ours.shares[row], clean.shares[row])


def test_rows_may_be_strided_and_what_is_not_served_is_left_to_the_reference() -> None:
    x, weight = random(4, 100), random(9, 72, seed=1)
    check(x[:, 20:92], weight, None, None, PLAIN)
    assert not triton_routes.serves(x[:0, :72], weight, None, None, PLAIN)
    assert not triton_routes.serves(random(4, 144)[:, ::2], weight, None, None, PLAIN)
    assert not triton_routes.serves(x[:, :72], weight.half(), None, None, PLAIN)
