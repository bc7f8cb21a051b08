"""The comparison with a reference itself: what passes as a tie, in the last logits and at a router's cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import index_picks
import pytest
import torch
from index_picks import _pick
from ties import ROUTER_TIE_BOUND, TIE_BOUND, IndexCuts, Reference, RouterCuts

PROMPT, THEIRS = [3, 4, 5], [6, 7, 8, 9]
OURS = [6, 7, 1, 2]  # unlike from the token on that follows position 4


class Scored(Reference):
    """A model of two layers with routers, whose scores are given."""

    def __init__(self, logit_gap: float = 1.0, *, layer: int = 0, position: int = 0, gap: float = 1.0, k: int = 2):
        self.num_compared = self.num_ties = self.num_router_ties = 0
        self.dtype, self.device, self.max_router_ties = "float32", "cpu", 1
        self.bound = TIE_BOUND[self.dtype]
        self._logit_gap, self._place, self._gap, self._k = logit_gap, (layer, position), gap, k
        self.model = self._forward

    def _forward(self, ids: torch.Tensor) -> Any:
        for layer in range(2):
            scores = torch.tensor([3.0, 0.5, 0.0, 1.5]).repeat(ids.shape[1], 1)
            if layer == self._place[0] and self._place[1] < ids.shape[1]:
                scores[self._place[1]] = torch.tensor([3.0, 2.0 - self._gap, 0.0, 2.0])
            scores.topk(self._k, dim=-1)
        return SimpleNamespace(logits=torch.tensor([0.0, self._logit_gap, 0.0]).expand(1, ids.shape[1], 3))


def counts(reference: Reference) -> tuple[int, int]:
    return reference.num_ties, reference.num_router_ties


@pytest.mark.parametrize(
    "reference",
    [
        Scored(),
        Scored(1.1e-4, gap=1.1 * ROUTER_TIE_BOUND),
        Scored(layer=1, position=5, gap=0.0),  # a later token is at a tie
        Scored(gap=0.0, k=1),  # the tie is not at the cut
        Scored(gap=0.0, k=4),  # all experts are taken
    ],
)
def test_a_difference_without_a_tie_fails(reference: Scored) -> None:
    with pytest.raises(AssertionError, match=r"token 2 of a prompt of 3: 1 instead of 8, gap .* at a router's cut"):
        reference.assert_greedy(PROMPT, OURS, THEIRS)
    assert counts(reference) == (0, 0)


@pytest.mark.parametrize(("layer", "position"), [(0, 0), (1, 2), (1, 4)])
def test_a_tie_of_a_router_in_any_layer_here_or_earlier_is_counted_by_itself(layer: int, position: int) -> None:
    reference = Scored(layer=layer, position=position, gap=0.9 * ROUTER_TIE_BOUND)
    reference.assert_greedy(PROMPT, THEIRS, THEIRS)
    assert counts(reference) == (0, 0)
    reference.assert_greedy(PROMPT, OURS, THEIRS)
    assert counts(reference) == (0, 1)
    with pytest.raises(AssertionError, match="1 router ties before"):
        reference.assert_greedy(PROMPT, OURS, THEIRS)
    assert counts(reference) == (0, 1)


def test_a_tie_of_logits_is_no_tie_of_a_router() -> None:
    reference = Scored(0.9e-4, gap=0.0)
    reference.assert_greedy(PROMPT, OURS, THEIRS)
    assert counts(reference) == (1, 0)


def test_other_picks_of_an_indexer_are_taken_and_counted_if_they_tie_with_its_own() -> None:
    """Of two rows, each with a slot that scores as the cut."""
    scores = torch.tensor([[[0.0, 1.0, 1.0 + 1e-7, 2.0], [0.5, 0.5, 0.5, 0.5]]])
    picks = torch.tensor([[1, 3], [2, 3]], dtype=torch.int32)
    with IndexCuts([picks]) as cuts:
        taken = scores.topk(2)
    assert taken.indices[0].tolist() == picks.tolist() and cuts.num_ties == 2
    assert taken.values[0].tolist() == [[1.0, 2.0], [0.5, 0.5]]
    with IndexCuts([torch.tensor([[0, 3], [2, 3]])]), pytest.raises(AssertionError, match=r"token 0 takes \{0\}"):
        scores.topk(2)


def _worst(scores: torch.Tensor, num_picks: int) -> torch.Tensor:
    """Pick the tokens of the lowest scores."""
    return _pick(-scores.where(scores.isfinite(), torch.inf), num_picks)


def test_a_text_of_a_model_with_indexers_is_compared_by_our_picks(checkpoint: Callable[..., Any]) -> None:
    """Wrong picks are no tie: they end the test, whatever the text."""
    reference = Reference(checkpoint("glm_moe_dsa"))
    prompt = list(range(3, 40))
    text = reference.generate(prompt, 5)
    reference.assert_greedy(prompt, text, text)
    assert reference.counts.startswith("1 outputs compared, 0 ties, 0 at a router's cut, 0 rows at an indexer's")
    with pytest.raises(AssertionError, match="token 3 of a prompt of 37"):
        reference.assert_text(prompt, [*text[:3], text[3] + 1, text[4]])
    worst = mock.patch.object(index_picks, "_pick", _worst)
    with worst, pytest.raises(AssertionError, match="in place of"):
        reference.assert_text(prompt, text)


FAMILIES: list[tuple[str, dict[str, Any], int]] = [  # cuts of each layer
    ("qwen3_moe", {}, 1),
    ("gpt_oss", {}, 1),
    ("minimax_m2", {}, 1),
    ("glm4_moe", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0}, 2),
    ("deepseek_v2", {"first_k_dense_replace": 0, "topk_method": "group_limited_greedy"}, 2),
    ("deepseek_v3", {"first_k_dense_replace": 0}, 2),
]


@pytest.mark.parametrize(("family", "config", "num_cuts"), FAMILIES, ids=[family for family, *_ in FAMILIES])
def test_the_routers_of_transformers_are_seen(
    family: str, config: dict[str, Any], num_cuts: int, checkpoint: Callable[..., Any]
) -> None:
    """Two equal experts are a tie wherever a router takes one of them and leaves the other."""
    reference = Reference(checkpoint(family, **config))
    reference.model = copy.deepcopy(reference.model)
    taken: list[torch.Tensor] = []  # experts of each token, by layer

    def note(module: Any, args: Any, output: Sequence[torch.Tensor]) -> None:
        taken.append(output[2])

    for module in reference.model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            for name in ("weight", "bias", "e_score_correction_bias"):
                if hasattr(module, name):
                    getattr(module, name).data[1] = getattr(module, name)[0]
            module.register_forward_hook(note)
    with RouterCuts() as cuts:
        reference.logits(range(1, 41))
    assert len(taken) == 2 and len(cuts.gaps) == 2 * num_cuts
    for experts, gaps in zip(taken, cuts.gaps[num_cuts - 1 :: num_cuts], strict=True):
        is_tied = (experts == 0).any(1) != (experts == 1).any(1)
        assert torch.equal(gaps < ROUTER_TIE_BOUND, is_tied) and 0 < int(is_tied.sum()) < 40, gaps
