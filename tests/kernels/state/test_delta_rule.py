"""The gated delta rule in blocks: equal bits however a text is divided, and the numbers of its formula."""

from __future__ import annotations

import pytest
import torch
from thinned import thinned
from torch import Tensor

from baton.kernels.state.delta_rule import DeltaWeights, gated_delta_rule

NUM_HEADS, NUM_SHARED, KEY_DIM, VALUE_DIM, NUM_TAPS = 2, 3, 12, 10, 4
NUM_CHANNELS = 2 * KEY_DIM + NUM_SHARED * VALUE_DIM


def weights(decay_dim: int = 1) -> DeltaWeights:
    torch.manual_seed(1)
    taps, a_log = torch.randn(NUM_HEADS, NUM_TAPS, NUM_CHANNELS), torch.rand(NUM_HEADS, NUM_SHARED)
    return DeltaWeights(taps, a_log, torch.randn(NUM_HEADS, NUM_SHARED, decay_dim), KEY_DIM, VALUE_DIM)


def rows_of(num_tokens: int, decay_dim: int = 1) -> Tensor:
    """Rows of a text behind the zeros before it."""
    torch.manual_seed(2)
    before = torch.zeros(NUM_TAPS - 1, NUM_HEADS, NUM_CHANNELS + NUM_SHARED * (1 + decay_dim))
    return torch.cat([before, torch.randn(num_tokens, *before.shape[1:])])


def token_by_token(rows: Tensor, own: DeltaWeights) -> Tensor:
    """The formula, in float64."""
    rows, (taps, a_log, dt_bias) = rows.double(), (each.double() for each in own[:3])
    state, outputs = torch.zeros(own.state_shape, dtype=torch.float64), []
    for last in range(NUM_TAPS - 1, len(rows)):
        window = rows[last - NUM_TAPS + 1 : last + 1, :, :NUM_CHANNELS].permute(1, 2, 0)
        mixed = torch.nn.functional.silu((window * taps.transpose(1, 2)).sum(2))
        q, k, v = mixed.split([KEY_DIM, KEY_DIM, NUM_SHARED * VALUE_DIM], 1)
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        b, a = rows[last, :, NUM_CHANNELS:].tensor_split([NUM_SHARED], 1)
        steps = -a_log.exp().unsqueeze(2) * torch.nn.functional.softplus(a.view_as(dt_bias) + dt_bias)
        state = state * steps.exp().unsqueeze(3)
        error = v.view(NUM_HEADS, NUM_SHARED, VALUE_DIM) - torch.einsum("hsdv,hd->hsv", state, k)
        state = state + torch.einsum("hd,hsv->hsdv", k, error * b.sigmoid().unsqueeze(2))
        outputs.append(torch.einsum("hsdv,hd->hsv", state, q).flatten(0, 1) * KEY_DIM**-0.5)
    return torch.stack(outputs)


@pytest.mark.parametrize(("block", "decay_dim"), [(1, 1), (4, KEY_DIM), (64, 1), (64, KEY_DIM)])
def test_blocks_have_the_numbers_of_the_formula(block: int, decay_dim: int) -> None:
    own, rows = weights(decay_dim), rows_of(150, decay_dim)
    outputs, _, states = gated_delta_rule(rows, torch.zeros(own.state_shape), own, block)
    assert len(states) == 150 // block
    torch.testing.assert_close(outputs.double(), token_by_token(rows, own), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("length", "block", "decay_dim"),
    thinned([(150, 64, 1), (90, 64, KEY_DIM), (300, 64, 1), (300, 16, 1), (300, 16, KEY_DIM)], lambda i, *_: i < 2),
)
def test_state_at_an_edge_and_rows_since_are_the_whole_bit_for_bit(length: int, block: int, decay_dim: int) -> None:
    """A text that ends at any token, and one that goes on from the last edge before it."""
    own, rows = weights(decay_dim), rows_of(length, decay_dim)
    start = torch.zeros(own.state_shape)
    whole, updates, states = gated_delta_rule(rows, start, own, block)
    at_edge = [start, *states]
    for stop in range(1, length + 1):
        index = (stop - 1) // block
        edge = index * block
        outputs, added, after = gated_delta_rule(rows[edge : stop + NUM_TAPS - 1], at_edge[index], own, block)
        assert torch.equal(outputs, whole[edge:stop]) and torch.equal(added, updates[edge:stop]), stop
        assert all(map(torch.equal, after, states[index:])), stop
    for index, state in enumerate(at_edge[: -(-length // block)]):
        outputs, _, after = gated_delta_rule(rows[index * block :], state, own, block)
        assert torch.equal(outputs, whole[index * block :])
        assert all(map(torch.equal, after, states[index:]))


def test_states_in_bfloat16_lose_less_at_edges_than_at_every_token() -> None:
    """Rounding to 8 significant bits moves a number by at most 2^-8 of itself. A block leaves of a state, and so of its
    error, no more than its decay. So errors are at most 2^-8 / (1 - decay) of the longest state, and those of outputs
    smaller by sqrt(key_dim). Blocks of one token round after every token."""
    rows, own = rows_of(1024), weights()
    own.a_log.sub_(3.5)  # states decay slowly
    exact = gated_delta_rule(rows, torch.zeros(own.state_shape), own, 64)
    start = torch.zeros(own.state_shape, dtype=torch.bfloat16)
    edges, tokens = gated_delta_rule(rows, start, own, 64), gated_delta_rule(rows, start, own, 1)
    assert {each.dtype for each in edges.states} == {torch.bfloat16} and edges.outputs.dtype == torch.float32
    first = NUM_SHARED * VALUE_DIM + KEY_DIM
    decay = exact.updates[63::64, :, first : first + NUM_SHARED].exp().amax(0)  # of a block, the largest
    longest = torch.stack(edges.states).float().flatten(3).norm(dim=3).amax(0)
    bound = 2.0**-8 * longest / (1 - decay) * KEY_DIM**-0.5
    lost, lost_by_token = edges.outputs - exact.outputs, tokens.outputs - exact.outputs
    assert (lost.abs().amax((0, 2)) <= bound.flatten()).all(), (lost.abs().amax((0, 2)), bound)
    assert 0 < 4 * lost.norm() < lost_by_token.norm()


def test_later_rows_do_not_touch_earlier_ones() -> None:
    own, rows = weights(), rows_of(70)
    whole, *_ = gated_delta_rule(rows, torch.zeros(own.state_shape), own, 64)
    rows[NUM_TAPS - 1 + 41 :] *= 30
    changed, *_ = gated_delta_rule(rows, torch.zeros(own.state_shape), own, 64)
    assert torch.equal(changed[:41], whole[:41]) and not torch.equal(changed[41:], whole[41:])
