"""Nodes whose ranks have sequences of their own give the tokens of nodes with one rank, with every kind of drafter.

Each case runs all requests of tests/support/matrix.py: greedy and seeded, with penalties, log-probabilities, several
choices and stops; together, with late ones, with prefix hits, and preempted. Some prompts are computed by the decode
node. The last cases run with BATON_WHOLE_MATRIX=1 alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import drafters
import pytest
from heads import ALGORITHM
from matrix import PAGE_SIZE, Cell, Plain, run_cell
from node_pair import node_pairs

CELLS = (Cell(False, True, False), Cell(True, True, True))
IS_WHOLE = "BATON_WHOLE_MATRIX" in os.environ


class Case(NamedTuple):
    """A pair of nodes."""

    drafter: str
    prefill: int  # ranks
    decode: int

    def __str__(self) -> str:
        return f"{self.drafter}-{self.prefill}-to-{self.decode}"


DRAFTERS = ("eagle", "none", "standalone", "eagle3", "mtp3-deepseek")
PAIRS = ((2, 2), (1, 2), (2, 1))
PAIRWISE = (Case("eagle", 2, 2), Case("none", 1, 2), Case("eagle3", 2, 1), Case("standalone", 1, 2))
CASES = [Case(drafter, *pair) for drafter in DRAFTERS for pair in PAIRS] if IS_WHOLE else list(PAIRWISE)


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plain]:
    """A target of which drafters are often right, and its output with one rank and no drafter."""
    model = drafters.make_bigram(checkpoint("llama"), tmp_path_factory.mktemp("model") / "target", 0.5)
    return model, Plain.of(model)


def settings_of(drafter: str, model: Path, directory: Path) -> dict[str, Any]:
    """Return the settings of a drafter that is right if its kind can be."""
    if drafter == "none":
        return {"speculative": "none"}
    if drafter == "standalone":
        draft = drafters.perturbed(model, directory / "standalone", 0.1)
        return {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 3}
    if drafter == "eagle":
        head = drafters.make_right(drafter, model, directory / drafter)
        return {"speculative": ALGORITHM[drafter], "draft_model": str(head), "draft_steps": 3}
    return drafters.settings(drafter, model, directory, steps=3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_is_that_of_one_rank(case: Case, plain: tuple[Path, Plain], tmp_path: Path) -> None:
    model, reference = plain
    both = {"page_size": PAGE_SIZE, "num_pages": 160, "max_running": 8, "chunk_tokens": 5}
    both |= settings_of(case.drafter, model, tmp_path)
    with node_pairs() as start:
        pair = start(
            model, prefill={**both, "dp_attention": case.prefill}, decode={**both, "dp_attention": case.decode}
        )
        for cell in CELLS:
            run_cell(pair, cell, reference.cases, "mixed")
        stats = pair.decode.rounds.stats
        assert case.drafter == "none" or stats.num_drafted > 0
        assert stats.num_accepted > (20 if case.drafter in ("eagle", "standalone") else -1), stats
