"""Ranks that sample some rows each get the tokens, and the best tokens of trees, that one rank samples."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from thread_ranks import ThreadGroup
from torch import Tensor

from baton.engine.models.decoder import LmHead
from baton.engine.products.base import VOCAB as SPLIT
from baton.engine.products.linear import Linear
from baton.engine.ranks.ranks import Ranks
from baton.engine.rounds.trees import sample_ahead, top_of
from baton.engine.sampling import row_shares
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.row_shares import RowShares
from baton.engine.sampling.sampling import sample
from baton.engine.sampling.state import SamplingState
from baton.metadata.wire.request import SamplingParams

VOCAB, SIZE = 97, 24  # no number of ranks divides the vocabulary
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.7, "seed": 3},
    {"temperature": 1.2, "top_k": 5, "min_p": 0.02, "seed": 4},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "seed": 5},
    {"temperature": 0.0},
    {"temperature": 0.7, "logit_bias": {3: 2.5}, "min_tokens": 9, "stop_ids": (4,), "seed": 6},
    {"temperature": 0.0, "frequency_penalty": 0.5},
]


@pytest.fixture(autouse=True)
def all_rows_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_shares, "LEAST_ROWS", 2)


def batch_of(num_rows: int, shares: RowShares | None = None) -> SamplingBatch:
    params = [SamplingParams(**{"max_tokens": 30, "seed": 1, **KINDS[row % len(KINDS)]}) for row in range(num_rows)]
    states = [SamplingState(each, [1, 2, 3], [5, row], vocab_size=VOCAB) for row, each in enumerate(params)]
    return replace(SamplingBatch.of(states), shares=shares)


def on_ranks(size: int, do: Callable[[Ranks], Any]) -> list[Any]:
    """Return what each of `size` ranks returns."""
    group = ThreadGroup(size, 30.0)

    def run(rank: int) -> Any:
        with group.turn:
            return do(Ranks(group.of(rank)))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def head_of(ranks: Ranks, weight: Tensor) -> LmHead:
    shard = ranks.shard(SPLIT)
    own = weight if shard is None else shard.take(weight, 0)
    return LmHead(Linear.of(own), ranks.vocab(len(weight)))


@pytest.fixture
def hidden() -> Tensor:
    states = torch.randn(14, SIZE, generator=torch.Generator().manual_seed(0))
    states[4] = torch.nan
    return states


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(1)) * 0.5


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_rows", [3, 14])
def test_tokens_are_those_of_one_rank(size: int, num_rows: int, hidden: Tensor, weight: Tensor) -> None:
    own = hidden[:num_rows]
    logits = on_ranks(size, lambda ranks: head_of(ranks, weight)(own))[0]  # whole, of the same products
    expected = sample(logits, batch_of(num_rows), with_logprobs=False)

    def draw(ranks: Ranks) -> tuple[int, Any]:
        batch = batch_of(num_rows, ranks.row_shares)
        logits = head_of(ranks, weight)(own, batch.lens(num_rows))
        return len(logits), sample(logits, batch, with_logprobs=False)

    found = on_ranks(size, draw)
    assert sum(num for num, _ in found) == num_rows and max(num for num, _ in found) == -(-num_rows // size)
    for _, result in found:
        assert torch.equal(result.is_valid, expected.is_valid)
        assert torch.equal(result.token_ids[expected.is_valid], expected.token_ids[expected.is_valid])
    assert (num_rows == 3) == bool(expected.is_valid.all())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_ids", [None, 3, 40])
def test_drafts_are_those_of_one_rank(size: int, num_ids: int | None, hidden: Tensor, weight: Tensor) -> None:
    """Chains and trees, of drafts of the whole vocabulary or of a part of it, fewer tokens than a tree asks for too."""
    own = torch.where(hidden.isnan(), 0.0, hidden)
    ids = None if num_ids is None else torch.arange(1, VOCAB, VOCAB // num_ids, dtype=torch.int32)[:num_ids]
    rows = weight if ids is None else weight[ids.long()]
    drafted = torch.arange(28).view(14, 2)

    def draw(ranks: Ranks) -> list[Tensor]:
        batch = batch_of(14, ranks.row_shares).over(ids)
        head = head_of(ranks, rows)
        logits = head(own, batch.lens(14))
        return [sample_ahead(logits, batch, drafted), *top_of(logits, batch, 4)]

    logits = on_ranks(size, lambda ranks: head_of(ranks, rows)(own))[0]
    expected = [sample_ahead(logits, batch_of(14).over(ids), drafted), *top_of(logits, batch_of(14).over(ids), 4)]
    for found in on_ranks(size, draw):
        for ours, theirs in zip(found[:1] + found[2:], expected[:1] + expected[2:], strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
        is_there = expected[2] > -torch.inf
        assert torch.equal(found[1][is_there], expected[1][is_there])


def test_few_rows_greedy_rows_and_rows_of_one_rank_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_shares, "LEAST_ROWS", 16)
    [shares, _] = on_ranks(2, lambda ranks: ranks.row_shares)
    assert batch_of(14, shares).lens(15) is None and batch_of(14, shares).lens(17) == (9, 8)
    assert batch_of(14).lens(64) is None and Ranks().row_shares is None
    greedy = [SamplingState(SamplingParams(max_tokens=3, temperature=0.0), [1], vocab_size=VOCAB)] * 20
    plain = replace(SamplingBatch.of(greedy), shares=shares)
    assert plain.lens(20) is None
