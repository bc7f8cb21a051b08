"""Nodes with ranks give the tokens of nodes with one rank, with every drafter and between unlike numbers of ranks.

Each case runs all requests of support/oracles/matrix.py: greedy and seeded, with penalties, log-probabilities, several
choices and stops; together, with late ones, with prefix hits, and preempted. The gate runs two of the cases, each with
four of the requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import drafters
import pytest
from drawn_places import Place
from heads import ALGORITHM
from matrix import ASKS, PAGE_SIZE, Cell, Plain, run_cell
from node_pair import node_pairs
from thinned import is_whole

from baton.engine.prompts import known_tokens

TWO = {"num_attention_heads": 4, "num_key_value_heads": 2}
THREE = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
SHARED = {**THREE, "num_key_value_heads": 1}  # three ranks have the same KV head
CELLS = (Cell(False, True, False), Cell(True, True, True))


class Case(NamedTuple):
    """A pair of nodes."""

    drafter: str
    topk: int
    config: dict[str, int]  # of the model
    prefill_tp: int
    decode_tp: int
    place: Place  # who computes the prompts

    def __str__(self) -> str:
        return f"{self.drafter}-{self.prefill_tp}-to-{self.decode_tp}"


CASES = (
    Case("eagle", 3, TWO, 1, 2, "remote"),
    Case("mtp3-deepseek", 1, TWO, 2, 1, "mixed"),
    Case("standalone", 1, SHARED, 1, 3, "mixed"),
    Case("frozen-kv-mtp", 3, THREE, 1, 3, "mixed"),
    Case("eagle3", 1, TWO, 2, 1, "remote"),
    Case(drafters.STREAM_MTP, 1, {}, 1, 2, "mixed"),
)[slice(None) if is_whole() else slice(1, 3)]


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`plain(case)`: a target of which drafters are often right, and its output with one rank and no drafter."""

    @functools.cache
    def get(name: str, config: tuple[tuple[str, int], ...]) -> tuple[Path, Plain]:
        model = drafters.target_of(name, checkpoint, **dict(config))
        if name != drafters.STREAM_MTP:
            model = drafters.make_bigram(model, tmp_path_factory.mktemp("model") / "target", 0.5)
        return model, Plain.of(model, ASKS if is_whole() else ASKS[:4])

    return lambda case: get(case.drafter if case.drafter == drafters.STREAM_MTP else "", tuple(case.config.items()))


def settings_of(case: Case, model: Path, directory: Path) -> dict[str, Any]:
    """Return the settings of a drafter that is right if its kind can be."""
    tree = {"draft_topk": case.topk, "draft_tokens": 8} if case.topk > 1 else {}
    if case.drafter == "standalone":
        draft = drafters.perturbed(model, directory / "standalone", 0.1)
        return {"speculative": "standalone", "draft_model": str(draft), "draft_steps": 3}
    if case.drafter in ("eagle", "frozen-kv-mtp"):
        head = drafters.make_right(case.drafter, model, directory / case.drafter)
        return {"speculative": ALGORITHM[case.drafter], "draft_model": str(head), "draft_steps": 3, **tree}
    return {**drafters.settings(case.drafter, model, directory, steps=3), **tree}


@pytest.fixture(autouse=True)
def ranks_know_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are shorter than what ranks get to know around a chunk. Let them know what a drafter reads."""
    monkeypatch.setattr(known_tokens, "MARGIN", 4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_is_that_of_one_rank(case: Case, plain: Callable[..., Any], tmp_path: Path) -> None:
    model, reference = plain(case)
    both = {"page_size": PAGE_SIZE, "num_pages": 190, "max_running": 10, "chunk_tokens": 5}
    both |= settings_of(case, model, tmp_path)
    with node_pairs() as start:
        pair = start(model, prefill={**both, "tp": case.prefill_tp}, decode={**both, "tp": case.decode_tp})
        for cell in CELLS:
            run_cell(pair, cell, reference.cases, case.place)
        stats = pair.decode.rounds.stats
        assert stats.num_drafted > 0
        is_right = case.drafter in ("eagle", "frozen-kv-mtp", "standalone")
        assert stats.num_accepted > (20 if is_right else -1), stats
