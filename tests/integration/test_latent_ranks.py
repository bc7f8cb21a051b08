"""Nodes of a model whose pool has latents: ranks divide the heads of queries, and all of them have every latent.

Each case runs all requests of oracles/matrix.py, as test_rank_pairs.py does, with a drafter that has KV heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import heads
import pytest
from matrix import ASKS, PAGE_SIZE, Cell, Plain, run_cell
from node_pair import node_pairs
from thinned import is_whole, thinned

SIZES = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6, "q_lora_rank": 48}
EXPERTS = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
CELLS = (Cell(False, True, False), Cell(True, True, True))


class Case(NamedTuple):
    """A pair of nodes."""

    layers: str  # "dense" or "experts"
    flag: str  # how ranks share the model
    prefill: int  # ranks
    decode: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


CASES = (
    Case("dense", "tp", 3, 1),
    Case("experts", "tp", 1, 2),
    Case("dense", "dp_attention", 2, 2),
    Case("experts", "dp_attention", 1, 2),
)


@pytest.fixture
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("deepseek_v3", **SIZES, **(EXPERTS if request.param == "experts" else {}))


@pytest.mark.parametrize(
    ("model", "case"),
    thinned([(case.layers, case) for case in CASES], lambda i, *_: 0 < i < 3),
    indirect=["model"],
    ids=lambda each: str(each) if isinstance(each, Case) else "",
)
def test_output_is_that_of_one_rank(model: Path, case: Case, tmp_path: Path) -> None:
    head = heads.write_head(
        tmp_path, "eagle", model, num_attention_heads=6, num_key_value_heads=6, intermediate_size=96
    )
    both: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 190, "max_running": 10, "chunk_tokens": 5}
    both |= {"speculative": "eagle", "draft_model": str(head), "draft_steps": 3}
    reference = Plain.of(model, ASKS if is_whole() else ASKS[:4])
    with node_pairs() as start:
        pair = start(model, prefill={**both, case.flag: case.prefill}, decode={**both, case.flag: case.decode})
        for cell in CELLS:
            run_cell(pair, cell, reference.cases, "mixed" if case.flag == "tp" else "remote")
        assert pair.decode.rounds.stats.num_drafted > 0
