"""Models of which some layers have a window: tail pages, between two nodes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_pair import node_pairs, params
from ties import Reference

PAGE_SIZE, NUM_NEW = 4, 40


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 512), k=num_tokens)


LENGTHS = (1, 3, 9, 17, 33, 60)


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_output_is_that_of_transformers(is_local: bool, chunk: int, checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("gpt_oss", sliding_window=9)
    both: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 300, "chunk_tokens": chunk}
    reference = Reference(model)
    with node_pairs() as start:
        pair = start(model, prefill=both, decode=both)
        for length in LENGTHS:
            pair.submit(str(length), prompt(length, length), params(NUM_NEW), is_local=is_local)
        results = pair.run()
        for length in LENGTHS:
            ids = prompt(length, length)
            reference.assert_greedy(ids, results[str(length), 0].ids, reference.generate(ids, NUM_NEW))
    assert reference.num_ties <= 1, reference.num_ties
