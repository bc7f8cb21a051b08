"""Both nodes on CUDA, their kernels compiled, rounds captured as graphs and overlapping: output is that of a CPU
without speculation, token for token, over the phases of the matrix {cold, prefix hit} x {alone, mixed} x
{preempted, not}."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from gpu_nodes import SPECULATIONS
from matrix import CELLS, PAGE_SIZE, Plain, run_cell
from node_pair import NodePair

from baton.kernels.operations import preferring

DEMO = Path(__file__).parents[2] / "deploy" / "demo"


@pytest.fixture(scope="module")
def plain() -> Callable[[], Plain]:
    """The reference, on the CPU."""
    return functools.cache(lambda: Plain.of(DEMO))


@pytest.mark.parametrize("chunk", [PAGE_SIZE, 64])
@pytest.mark.parametrize("name", SPECULATIONS)
def test_output_is_that_of_the_cpu(name: str, chunk: int, plain: Callable[[], Plain]) -> None:
    reference = plain()
    torch.backends.cuda.matmul.allow_tf32 = False
    both = {"device": "cuda", "dtype": "float32", "page_size": PAGE_SIZE, "num_pages": 190, "max_running": 10}
    both |= {"chunk_tokens": chunk, **SPECULATIONS[name]}
    with preferring("triton"), closing(NodePair(DEMO, prefill=both, decode=both)) as pair:
        for cell in CELLS:
            run_cell(pair, cell, reference.cases)
        pair.check_books()
        stats = pair.decode.rounds.stats
    assert name == "none" or stats.num_drafted > stats.num_accepted > 0, stats
