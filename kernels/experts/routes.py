"""The experts that each row chooses in a mixture of experts, and their shares of its output (arXiv:1701.06538).

    product    x W^T + b, in float32
    score      softmax, sigmoid or sqrt(softplus) of the product
    choice     the num_active largest of score + bias, of the num_active_groups best groups of experts
    share      the score, without bias; divided by the sum of those that are chosen if `sums_to_one`; times scaling

A group's rank is its largest score (DeepSeek-V2, arXiv:2405.04434), or the sum of its two largest ones with their
biases (DeepSeek-V3, arXiv:2412.19437). Of equal scores and of equal groups the first one is chosen.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operations import Operation

LEAST_TOTAL = 1e-20  # added to the sum of scores that divides them, as it may be 0 unless they are a softmax


class Routing(NamedTuple):
    """How experts are chosen, and what their shares are."""

    num_active: int  # experts of a row
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    sums_to_one: bool = False  # shares, before scaling
    scaling: float = 1.0  # of shares
    num_groups: int = 1  # of neighbouring experts, all of one size
    num_active_groups: int = 1  # groups that the experts of a row are in
    num_ranking: int = 1  # largest scores of a group, whose sum ranks it


class Routes(NamedTuple):
    """The experts of each row, best first, and their shares of the output."""

    chosen: Tensor  # [num_rows, num_active] int64
    shares: Tensor  # [num_rows, num_active] float32


def routes_ref(x: Tensor, weight: Tensor, product_bias: Tensor | None, bias: Tensor | None, routing: Routing) -> Routes:
    """Return the routes of rows `x` [num_rows, size]. `weight` [num_experts, size], `product_bias` and `bias`
    [num_experts] are float32."""
    scores = _scores(F.linear(x.float(), weight, product_bias), routing)
    ranking = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        ranking = _of_best_groups(ranking, routing)
    return _routes(scores, _best(ranking, routing.num_active), routing)


def shares_of_ref(x: Tensor, weight: Tensor, chosen: Tensor, routing: Routing) -> Routes:
    """Return the routes of rows `x` [num_rows, size] whose experts `chosen` [num_rows, num_active] int64 are given.
    `weight` [num_experts, size] float32."""
    return _routes(_scores(F.linear(x.float(), weight), routing), chosen, routing)


def _scores(product: Tensor, routing: Routing) -> Tensor:
    match routing.scoring:
        case "softmax":
            return product.softmax(-1)
        case "sigmoid":
            return product.sigmoid()
        case "sqrtsoftplus":
            return F.softplus(product).sqrt()


def _routes(scores: Tensor, chosen: Tensor, routing: Routing) -> Routes:
    shares = scores.gather(1, chosen)
    if routing.sums_to_one:
        shares = shares / (shares.sum(-1, keepdim=True) + (0.0 if routing.scoring == "softmax" else LEAST_TOTAL))
    return Routes(chosen, shares if routing.scaling == 1 else shares * routing.scaling)


def _of_best_groups(ranking: Tensor, routing: Routing) -> Tensor:
    """Return the ranking with -inf for experts of other groups: [num_rows, num_experts]."""
    groups = ranking.unflatten(1, (routing.num_groups, -1))
    of_groups = groups.topk(routing.num_ranking, dim=-1).values.sum(-1)
    best = _best(of_groups, routing.num_active_groups)
    is_best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~is_best.unsqueeze(-1), float("-inf")).flatten(1)


def _best(scores: Tensor, number: int) -> Tensor:
    """Return the places of the largest scores of each row, largest first. `topk` may take any of equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :number].contiguous()


routes = Operation("routes", routes_ref)
shares_of = Operation("shares_of", shares_of_ref)
