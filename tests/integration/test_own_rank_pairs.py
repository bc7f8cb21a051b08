"""Nodes whose ranks have sequences of their own give the tokens of nodes with one rank, with every kind of drafter.

Each case runs all requests of support/oracles/matrix.py: greedy and seeded, with penalties, log-probabilities, several
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
from node_pair import ROUTER_EPOCH, node_pairs, params

from baton.metadata.wire.messages import Cancel

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


# a round is begun before the one before has ended, as on GPUs
BOTH = [(case, overlaps) for case in CASES for overlaps in ((False, True) if IS_WHOLE else (case.decode == 2,))]


@pytest.mark.parametrize(("case", "overlaps"), BOTH, ids=str)
def test_output_is_that_of_one_rank(case: Case, overlaps: bool, plain: tuple[Path, Plain], tmp_path: Path) -> None:
    model, reference = plain
    both = {"page_size": PAGE_SIZE, "num_pages": 190, "max_running": 10, "chunk_tokens": 5}
    both |= settings_of(case.drafter, model, tmp_path)
    with node_pairs() as start:
        pair = start(
            model,
            prefill={**both, "dp_attention": case.prefill},
            decode={**both, "dp_attention": case.decode},
            overlaps=overlaps,
        )
        for cell in CELLS:
            run_cell(pair, cell, reference.cases, "mixed")
        stats = pair.decode.rounds.stats
        assert case.drafter == "none" or stats.num_drafted > 0
        assert stats.num_accepted > (20 if case.drafter in ("eagle", "standalone") else -1), stats


def test_scores_of_local_prompts_and_cancels_in_every_phase(plain: tuple[Path, Plain]) -> None:
    """Both ranks of the decode node score a prompt of their own. Then requests are cancelled after so many steps."""
    model, reference = plain
    both = {"page_size": PAGE_SIZE, "num_pages": 40, "chunk_tokens": 5, "speculative": "ngram"}
    asked = params(4, num_logprobs=2)
    with node_pairs() as start:
        pair = start(model, prefill=both, decode={**both, "dp_attention": 2})
        for is_local in (False, True):
            for index, case in enumerate(reference.cases[:3]):
                pair.submit(f"{index} {is_local}", case.prompt, asked, is_local=is_local, prompt_logprobs=True)
        ranks = set[int]()
        while not pair.is_done:
            pair.step()
            ranks |= {each.rank for each in pair.decode.scheduler if each.is_local and each.prompt_scores is not None}
        assert ranks == {0, 1}
        for index, case in enumerate(reference.cases[:3]):
            theirs, ours = (pair.done[f"{index} {is_local}"].prompt_logprobs for is_local in (False, True))
            assert len(ours) == len(case.prompt) - 1
            assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
        pair._take = pair._merge = lambda *_: None  # late tokens of cancelled requests
        for num_steps in range(0, 14, 2):
            for index, case in enumerate(reference.cases):
                pair.submit(f"{num_steps}.{index}", case.prompt, params(24), n=2, is_local=index % 3 == 0)
            for _ in range(num_steps):
                pair.step()
            pair._waiting.clear()
            for rid in {rid for rid, _ in pair.results if rid.startswith(f"{num_steps}.")}:
                for node in ("prefill", "decode"):
                    pair.send(node, Cancel(ROUTER_EPOCH, rid, 9, None, "test"))
                pair.results.pop((rid, 0)), pair.results.pop((rid, 1))
            pair.run(timeout_s=10)
        assert not pair.decode.scheduler._rank_of
