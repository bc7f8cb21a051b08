"""Nodes with a host tier: what comes back from it gives the same text as what is computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_pair import NodePair, node_pairs, params

PAGE_SIZE = 4
SETTINGS: dict[str, Any] = {"page_size": PAGE_SIZE, "chunk_tokens": 16}
MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs() as start:
        yield start


def run_all(pair: NodePair, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Run all prompts one after the other. Return the tokens of each."""
    texts: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        rid = f"r{len(pair.results)}"
        pair.submit(rid, prompt, params(6, seed=index, temperature=float(index % 2)), **options)
        result = pair.run()[rid, 0]
        assert result.failed is None, result.failed
        texts.append(result.ids)
    return texts


@pytest.mark.parametrize("is_local", [False, True])
def test_a_second_pass_over_three_times_the_pool_computes_only_what_is_new(
    is_local: bool, checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    rng = random.Random(1)
    prompts = [rng.choices(range(50), k=40) for _ in range(12)]
    computed: list[int] = []
    texts: list[list[list[int]]] = []
    for tier in ({}, {"host_cache_gb": 0.01}):
        node = {**SETTINGS, **tier, "num_pages": 41}
        pair = make_pair(checkpoint("llama"), prefill=node, decode=node)
        texts += [run_all(pair, prompts, is_local=is_local)]
        member = pair.decode if is_local else pair.prefill
        before = member.stats().computed_tokens
        texts += [run_all(pair, prompts, is_local=is_local)]
        computed.append(member.stats().computed_tokens - before)
    assert all(each == texts[0] for each in texts)
    num_last = 3 if is_local else 4  # a decode node computes the last token in a round
    assert computed[1] == 12 * num_last < computed[0] / 8, computed
