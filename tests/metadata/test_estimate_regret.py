"""Decisions by estimates lose no more than they did when each had an estimator of its own.

`python tests/support/estimate_traces.py SEEDS DECISION` prints such figures. The bounds are those of the estimators
that `Estimate` replaced, over the same seeds.
"""

from __future__ import annotations

import os

import pytest
from estimate_traces import TRACES, regret

NUM_SEEDS = {"drafts": 16, "gaps": 8, "placement": 10, "retry": 10}
BOUNDS = {  # in the order of TRACES
    "drafts": [(0.01248,), (0.01229,), (0.01919,), (-0.03068,), (0.03892,)],
    "gaps": [(0.00348, 0.3485), (0.00741, 0.7147), (0.00530, 1.1275), (0.00429, 0.9582), (0.00588, 1.3965)],
    "placement": [(0.00018,), (0.01275,), (0.00017,), (0.00032,), (0.00061,)],
    "retry": [(0.07328,), (0.22959,), (0.08983,), (0.10687,), (0.09996,)],
}
SLACK = {"drafts": (0.0002,), "gaps": (0.0001, 0.01), "placement": (0.0001,), "retry": (0.0001,)}  # of the seeds
SLOW = {"drafts", "gaps"}  # test_adaptive.py and test_chunk_budget.py hold less of them in less time


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("decision", NUM_SEEDS)
def test_regret(decision: str, trace: str) -> None:
    if decision in SLOW and "BATON_WHOLE_MATRIX" not in os.environ:
        pytest.skip("takes long; runs with BATON_WHOLE_MATRIX=1")
    bounds = BOUNDS[decision][TRACES.index(trace)]
    found = regret(decision, trace, NUM_SEEDS[decision])
    assert all(each <= bound + slack for each, bound, slack in zip(found, bounds, SLACK[decision], strict=True)), found
