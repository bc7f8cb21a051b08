"""Promise P2: a draft that is the target has every token accepted, greedy and seeded, whatever ids it uses for them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import make_bigram, make_right
from heads import ALGORITHM
from node_pair import params
from safetensors.torch import load_file, save_file
from solo import Solo

from baton.engine import trees
from baton.engine.drafters import frozen_kv, shifted, standalone
from baton.engine.sampling_batch import SamplingBatch

PROMPTS = [[random.Random(i).randrange(512) for _ in range(3 + 4 * i)] for i in range(5)]
RIGHT = ("eagle", "eagle3", "mtp-deepseek", "mtp-mimo", "frozen-kv-mtp")
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.1}


def run(solo: Solo, fields: dict[str, Any]) -> tuple[int, int]:
    """(accepted, drafted) over a batch that drafts 5, 1, 0, 3 and 5 tokens."""
    sequences = [solo.start(prompt, params(60, seed=i, **fields), chunk=6) for i, prompt in enumerate(PROMPTS)]
    for num_steps in (5, 1, 0, 3, 5):
        solo.round(sequences, num_steps)
    return solo.rounds.stats.num_accepted, solo.rounds.stats.num_drafted


def check(solo: Solo, fields: dict[str, Any]) -> None:
    num_accepted, num_drafted = run(solo, fields)
    assert num_accepted == num_drafted == 14 * len(PROMPTS)


class Permuted:
    """A model whose own id i is the target's id `ids[i]`: the way in and the way out as a draft vocabulary has them."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        """`model` has rows of embedding and output matrix in the order of `ids` [vocab_size] int64."""
        self.model, self.ids = model, ids
        self.own_ids = ids.argsort()  # by target id

    def forward(self, batch: Any, kv: torch.Tensor) -> torch.Tensor:
        return self.model.forward(replace(batch, input_ids=self.own_ids[batch.input_ids]), kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self.model.logits(hidden)
        return own.new_full(own.shape, float("-inf")).index_copy_(1, self.ids, own)


@pytest.fixture
def permuted(checkpoint: Callable[..., Path], tmp_path: Path) -> Solo:
    """The target drafts for itself in a permuted vocabulary."""
    model = checkpoint("llama")
    draft = Path(shutil.copytree(model, tmp_path / "permuted"))
    ids = torch.randperm(512, generator=torch.Generator().manual_seed(7))
    tensors = load_file(draft / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][ids].contiguous()
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    solo = Solo(model, speculative="standalone", draft_model=str(draft))
    solo.drafter._model = Permuted(solo.drafter._model, ids)  # type: ignore[attr-defined]
    return solo


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_a_permuted_vocabulary_is_always_accepted(permuted: Solo, fields: dict[str, Any]) -> None:
    check(permuted, fields)


def test_noise_of_the_drafts_own_ids_is_caught(permuted: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: the draft draws with the noise of its own ids, and maps afterwards: right greedily, else hardly."""
    ids = permuted.drafter._model.ids  # type: ignore[attr-defined]
    original = trees.sample_ahead

    def own_noise(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return ids[original(logits[:, ids], *rest)]

    monkeypatch.setattr(standalone, "sample_ahead", own_noise)
    check(permuted, {"temperature": 0.0})
    permuted.rounds.stats.num_accepted = permuted.rounds.stats.num_drafted = 0
    num_accepted, num_drafted = run(permuted, {"temperature": 1.0})
    assert num_accepted < 0.8 * num_drafted, (num_accepted, num_drafted)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_head_that_is_the_target_is_always_accepted(
    name: str, fields: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Of a target whose next token depends on the last alone, in published layouts; EAGLE-3 by a permutation in d2t."""
    model = make_bigram(checkpoint("llama"), tmp_path / "bigram")
    head = make_right(name, model, tmp_path / "head")
    check(Solo(model, speculative=ALGORITHM[name], draft_model=str(head)), fields)


def test_noise_of_another_position_is_caught(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: a draft draws with the noise of the position it stands at, not of the token it proposes."""
    model = make_bigram(checkpoint("llama"), tmp_path / "bigram")
    solo = Solo(model, speculative="eagle", draft_model=str(make_right("eagle", model, tmp_path / "head")))
    original = trees.sample_ahead

    def early(logits: torch.Tensor, base: SamplingBatch, drafted: torch.Tensor) -> torch.Tensor:
        return original(logits, base.ahead(torch.full((1, 1), -1), drafted[:, :0]), drafted)

    monkeypatch.setattr(shifted, "sample_ahead", early)
    num_accepted, num_drafted = run(solo, {"temperature": 1.5})
    assert num_accepted < 0.8 * num_drafted, (num_accepted, num_drafted)


# --- trees ---


def grow(name: str, directory: Path, model: Path, **shape: int) -> Solo:
    """A head of kind `name` that is the target, a bigram, and drafts trees."""
    bigram = make_bigram(model, directory / "bigram")
    head = make_right(name, bigram, directory / "head")
    return Solo(bigram, speculative=ALGORITHM[name], draft_model=str(head), **shape)


def run_trees(solo: Solo, fields: dict[str, Any]) -> float:
    """Share of accepted drafts, over rounds of which one drafts nothing."""
    sequences = [solo.start(prompt, params(60, seed=i, **fields), chunk=6) for i, prompt in enumerate(PROMPTS)]
    for num_steps in (solo.rounds.shape.num_steps, 0, *[solo.rounds.shape.num_steps] * 4):
        solo.round(sequences, num_steps)
    assert solo.rounds.stats.num_verified == 5 * len(PROMPTS)
    return solo.rounds.stats.num_accepted / solo.rounds.stats.num_drafted


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_whole_tree_of_a_head_that_is_the_target_is_always_accepted(
    name: str, fields: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Two steps, every candidate verified: the target's path is among them, whatever their scores."""
    solo = grow(name, tmp_path, checkpoint("llama"), draft_topk=3, draft_steps=2, draft_tokens=12)
    assert run_trees(solo, fields) == 1.0


@pytest.mark.parametrize("name", ["eagle", "frozen-kv-mtp"])
def test_noise_of_another_position_in_a_tree_is_caught(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: nodes draw with the noise of the depth they stand at, not of the one that they propose."""
    solo = grow(name, tmp_path, checkpoint("llama"), draft_topk=3, draft_steps=2, draft_tokens=12)
    original = trees.top_of

    def early(logits: torch.Tensor, base: SamplingBatch, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        return original(logits, base.ahead(torch.full((1, 1), -1), base.ints.new_empty(base.num_rows, 0)), topk)

    for module in (trees, shifted, frozen_kv):
        monkeypatch.setattr(module, "top_of", early)
    assert run_trees(solo, {"temperature": 1.5}) < 0.8
