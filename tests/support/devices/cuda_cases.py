"""Drafters, kinds of sampling and batches that grow and shrink, for tests of rounds as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton.kernels.operations import preferring

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 1.3, "logit_bias": {7: 2.0}, "presence_penalty": 0.3, "num_logprobs": 2},
]
MEMBERS = ((0,), (1, 0), (2, 1, 0), (0, 2), (1, 2, 0), (2,))  # of three sequences, round after round
CASES: list[tuple[str, dict[str, int]]] = [  # drafters (drafters.py) and settings beside theirs
    *[(name, {}) for name in ("ngram", "standalone", "eagle3", "frozen-kv-mtp", "mtp3-deepseek")],
    ("eagle", {"draft_topk": 2, "draft_steps": 3}),
]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Prefer our kernels: only with them can a forward be captured."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with preferring("triton"):
        yield
