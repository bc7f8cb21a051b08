"""Index scores by the CPU's kernel."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("numba")

from baton.kernels.attention.numba_picks import index_scores
from baton.kernels.attention.picks import Sight, index_scores_ref

PAGE_SIZE = 4


def test_a_score_does_not_depend_on_the_forward_it_is_computed_in() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(60, 1, 1, PAGE_SIZE, 24, generator=generator)
    q, weights = torch.randn(30, 5, 24, generator=generator), torch.randn(30, 5, generator=generator)
    whole = Sight.of(torch.randperm(59)[None, :10] + 1, [30], torch.tensor([37]))
    keys[whole.block_table[0, -1], :, :, 37 % PAGE_SIZE :] = float("nan")  # beyond the sequence
    scores = index_scores(q, weights, keys, whole)
    torch.testing.assert_close(scores, index_scores_ref(q, weights, keys, whole), rtol=1e-5, atol=1e-5)
    assert torch.equal(scores > float("-inf"), whole.seen)
    for start, stop in itertools.pairwise([0, 1, 8, 30]):
        part = Sight.of(whole.block_table, [stop - start], torch.tensor([7 + stop]))
        found = index_scores(q[start:stop], weights[start:stop], keys, part)
        assert torch.equal(found, scores[start:stop, : 7 + stop])
