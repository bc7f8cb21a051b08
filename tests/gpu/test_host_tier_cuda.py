"""The host tier of nodes on CUDA: text is that of a node without one, whatever is evicted, and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from node_pair import NodePair, params

from baton.engine.tiers.cuda_copies import CudaCopies

SETTINGS: dict[str, Any] = {"device": "cuda", "page_size": 16, "chunk_tokens": 64}


@pytest.fixture(autouse=True)
def _no_tf32(no_tf32: None) -> None:
    """Products are float32."""


def texts(pair: NodePair, prompts: list[list[int]], evict: Callable[[], object]) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        pair.submit(f"r{index}", prompt, params(12), is_local=index % 3 == 0)
        while len(pair._waiting) > 2:
            evict()
            pair.step()
    while not pair.is_done:
        evict()
        pair.step()
    assert all(result.failed is None for result in pair.results.values())
    return [result.ids for result in pair.results.values()]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_evictions_at_every_moment_change_no_token(family: str, checkpoint: Callable[..., Path]) -> None:
    rng = random.Random(1)
    start = rng.choices(range(1, 500), k=40)
    prompts = [start + rng.choices(range(1, 500), k=rng.randint(20, 150)) for _ in range(10)] * 2
    model = checkpoint(family)
    with closing(
        NodePair(model, prefill={**SETTINGS, "num_pages": 400}, decode={**SETTINGS, "num_pages": 400})
    ) as pair:
        expected = texts(pair, prompts, lambda: None)
    tight = {**SETTINGS, "num_pages": 60, "host_cache_gb": 0.1}
    with closing(NodePair(model, prefill=tight, decode=tight)) as pair:
        for node in (pair.prefill, pair.decode):
            assert node.cache.tier is not None and isinstance(node.cache.tier.copies, CudaCopies)
            assert all(kind.slots.is_pinned() for kind in (node.cache.tier.copies._kept,))

        def evict() -> None:
            for node in (pair.prefill, pair.decode):
                if rng.random() < 0.3:
                    node.cache.evict(rng.randint(1, 40))

        assert texts(pair, prompts, evict) == expected
        torch.cuda.synchronize()
        for node in (pair.prefill, pair.decode):
            figures = node.stats().host
            assert figures is not None and figures.num_restored > 0 and figures.num_stored > 0
        pair.check_books()
