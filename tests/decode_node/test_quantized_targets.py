"""FP8 targets through the handoff: their text is that of transformers' model that rounds alike, for every batch, chunk
and number of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drafters
import pytest
from node_pair import NodePair, node_pairs, params
from quantized import ONLINE, SCHEMES, Scheme, quantized, rounding_model
from ties import Reference

PROMPTS = [random.Random(seed).choices(range(1, 512), k=length) for seed, length in enumerate((3, 17, 40, 40, 29))]
PROMPTS[3] = PROMPTS[2][:20] + PROMPTS[3][20:]  # its beginning is in the prefix cache
LENGTH = 16
MAX_TIES = 2  # of 10 outputs: a last bit of float32 may decide how a number is rounded

Checkpoint = Callable[..., Path]


@pytest.fixture
def start() -> Iterator[Callable[..., NodePair]]:
    with node_pairs() as start:
        yield start


class RoundingReference(Reference):
    """Transformers' model of a plain checkpoint that rounds as a scheme says."""

    def __init__(self, plain: Path, scheme: Scheme) -> None:
        super().__init__(plain)
        self.dtype, self.model = "fp8", rounding_model(plain, scheme)
        self.model.generation_config.eos_token_id = None


@pytest.mark.parametrize(
    ("name", "drafter", "nodes"),
    [
        ("blocks", "none", {"chunk_tokens": 7}),
        ("blocks", "eagle", {"chunk_tokens": 64}),
        ("ue8m0", "standalone", {"chunk_tokens": 5}),
        ("w8a8", "eagle3", {"chunk_tokens": 9}),
        ("fp8-static", "ngram", {"chunk_tokens": 64}),
        ("w8a16", "mtp-deepseek", {"chunk_tokens": 11}),
        ("online", "none", {"chunk_tokens": 6, "quantization": "fp8"}),
        ("online", "eagle", {"chunk_tokens": 64, "quantization": "fp8"}),
    ],
)
def test_the_text_is_that_of_a_model_that_rounds_alike(
    name: str,
    drafter: str,
    nodes: dict[str, Any],
    checkpoint: Checkpoint,
    tmp_path: Path,
    start: Callable[..., NodePair],
) -> None:
    plain, scheme = checkpoint("llama", intermediate_size=200), ONLINE if name == "online" else SCHEMES[name]
    model = plain if name == "online" else quantized(plain, tmp_path / name, scheme)
    speculation = {} if drafter == "none" else drafters.settings(drafter, plain, tmp_path, steps=3)
    both = {"page_size": 4, "num_pages": 240, "max_running": 10, **nodes, **speculation}
    pair, reference = start(model, prefill=both, decode=both), RoundingReference(plain, scheme)
    expected = [reference.generate(prompt, LENGTH) for prompt in PROMPTS]
    for turn in ("first", "again"):  # alone at first, then in company
        for index, prompt in enumerate(PROMPTS):
            pair.submit(f"{turn} {index}", prompt, params(LENGTH))
            if turn == "first":
                pair.run()
    results = pair.run()
    for turn in ("first", "again"):
        for index, prompt in enumerate(PROMPTS):
            reference.assert_greedy(prompt, results[f"{turn} {index}", 0].ids, expected[index])
    assert reference.num_compared == 2 * len(PROMPTS) and reference.num_ties <= MAX_TIES, reference.num_ties
