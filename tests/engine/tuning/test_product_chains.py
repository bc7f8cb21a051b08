"""Chains of products: every small product of a model and its drafter is in one, and a chain runs all its products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.models.registry import load_model
from baton.engine.ranks.group import OneRank
from baton.engine.ranks.ranks import Ranks
from baton.engine.tuning.product_chains import Chain, find_chains

BODY = [("plain", (128, 64)), ("added", (64, 64)), ("gated", (256, 64)), ("added", (64, 128))]
HEAD = [("plain", (512, 64))]


def load(model: Path, dtype: str = "float16", **more: Any) -> Engine:
    return Engine(EngineConfig(model=str(model), device="cpu", dtype=dtype, num_pages=20, **more))  # type: ignore[arg-type]


def uses(chain: Chain) -> list[tuple[str, tuple[int, ...]]]:
    return [(use.mode, tuple(use.weight.shape)) for use in chain.uses]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layers_and_head_of_a_model(family: str, checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(family))
    assert [uses(chain) for chain in find_chains(engine.model, engine.drafter)] == [BODY, HEAD]


def test_experts_have_kernels_of_their_own(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint("qwen3_moe"))
    assert [uses(chain) for chain in find_chains(engine.model)] == [BODY[:2], HEAD]


def test_products_of_attention_to_latents_are_alone(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint("deepseek_v3", q_lora_rank=48))
    found = [uses(chain) for chain in find_chains(engine.model)]
    assert found[0] == BODY[2:]
    alone = [(48 + 56, 64), (4 * 36, 48), (64, 4 * 24), (512, 64)]
    assert sorted(found[1:]) == sorted([("plain", shape)] for shape in alone)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("eagle", [[("plain", (64, 128))]]),
        ("eagle3", [[("plain", (24, 192))]]),  # a head of width 24
    ],
)
def test_a_drafter_adds_its_own(
    name: str, more: list[list[Any]], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    engine = load(model, **settings(name, model, tmp_path))
    own = {tuple(uses(chain)) for chain in find_chains(engine.model)}
    both = {tuple(uses(chain)) for chain in find_chains(engine.model, engine.drafter)}
    assert own < both
    assert {tuple(each) for each in more} <= both - own, both - own


def test_float32_has_none(checkpoint: Callable[..., Path]) -> None:
    assert find_chains(load(checkpoint("llama"), "float32").model) == []


@pytest.mark.parametrize("has_attention", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_chain_runs_all_its_products(family: str, has_attention: bool, checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(family))
    for chain in find_chains(engine.model):
        x = torch.randn(3, chain.in_size, dtype=torch.float16)
        norm = torch.ones_like(x[0])
        step = engine.padding_step(3) if has_attention else None
        with torch.inference_mode():
            before = chain.run(x.clone(), norm, step)
            for use in chain.uses:
                kept = use.weight.clone()
                use.weight.zero_()
                after = chain.run(x.clone(), norm, step)
                use.weight.copy_(kept)
                assert isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
                assert not torch.equal(before, after), use


def test_a_rank_measures_its_own_share_alone(checkpoint: Callable[..., Path]) -> None:
    """No collective operation is in a chain: other ranks wait elsewhere meanwhile."""

    class Nobody(OneRank):
        rank, size = 0, 2

        def sum(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("no other rank takes part")

        def sum_norm_(self, *_: object) -> torch.Tensor:
            raise AssertionError("no other rank takes part")

    model_dir = checkpoint("llama")
    model = load_model(model_dir, read_model_config(model_dir), torch.float16, "cpu", ranks=Ranks(Nobody()))
    chains = find_chains(model)
    half = [("plain", (64, 64)), ("added", (64, 32)), ("gated", (128, 64)), ("added", (64, 64))]
    assert [uses(chain) for chain in chains] == [half, [("plain", (256, 64))]]
    for chain in chains:
        x = torch.zeros(2, chain.in_size, dtype=torch.float16)
        chain.run(x, torch.ones_like(x[0]), None)
