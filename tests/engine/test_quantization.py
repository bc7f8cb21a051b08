"""--quantization, and what it makes of a node: another model, which other nodes refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import SCHEMES, quantized

from baton.engine.checkpoint import Checkpoint
from baton.engine.config import EngineConfig
from baton.engine.engine import read_target
from baton.engine.fingerprint import fingerprint
from baton.engine.group import OneRank
from baton.engine.models.read_config import read_model_config
from baton.engine.products.base import INNER_IN, INNER_OUT
from baton.engine.products.fp8 import Fp8ProductOnCpu
from baton.engine.quantization import ONLINE_FP8, chosen
from baton.engine.ranks import Ranks, check_shares
from baton.engine.weights import CheckpointWeights
from baton.metadata.errors import ConfigError

BLOCKS = SCHEMES["blocks"]


def config(**more: Any) -> EngineConfig:
    return EngineConfig(router="tcp://127.0.0.1:1", **more)


def test_auto_takes_the_checkpoint_as_it_is(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    plain = checkpoint("llama")
    assert read_target(plain, config()).quantization is None
    path = quantized(plain, tmp_path / "fp8", BLOCKS)
    found = read_target(path, config()).quantization
    assert found is not None and not found.is_online
    assert chosen(found, "auto") is found


def test_nodes_of_both_refuse_each_other(checkpoint: Callable[..., Path]) -> None:
    plain = checkpoint("llama")
    online = read_target(plain, config(quantization="fp8"))
    assert online.quantization == ONLINE_FP8
    assert fingerprint(plain, online) != fingerprint(plain, read_target(plain, config()))


def test_a_quantized_checkpoint_is_not_quantized_again(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = quantized(checkpoint("llama"), tmp_path / "fp8", BLOCKS)
    with pytest.raises(ConfigError, match="--quantization fp8: the checkpoint is quantized already; leave the option"):
        read_target(path, config(quantization="fp8"))


def test_ranks_that_would_round_other_rows_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    plain = read_model_config(checkpoint("llama"))
    rows = dataclasses.replace(plain, quantization=ONLINE_FP8)
    check_shares(rows, 1, "the model")
    for has_all_heads in (False, True):
        with pytest.raises(ConfigError, match=r"the model rounds each row of activations to FP8 .* use one rank"):
            check_shares(rows, 2, "the model", has_all_heads=has_all_heads)
    blocks = read_model_config(quantized(checkpoint("llama"), tmp_path / "fp8", BLOCKS))
    with pytest.raises(ConfigError, match="2 ranks would have 64 hidden units each, which cuts a block; use fewer"):
        check_shares(blocks, 2, "the model", has_all_heads=True)
    wide = dataclasses.replace(blocks, intermediate_size=256)
    check_shares(wide, 2, "the model", has_all_heads=True)
    with pytest.raises(ConfigError, match="2 ranks would have 32 numbers of query heads each"):
        check_shares(wide, 2, "the model")


class OneOf(OneRank):
    """A place among ranks that never meet."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("name", ["blocks", "fp8-static", "w8a16"])
def test_the_shares_of_ranks_sum_to_the_whole(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A feed-forward layer of 256 hidden units on two ranks: each rounds the rows as one rank does."""
    plain = checkpoint("llama", intermediate_size=256)
    path = quantized(plain, tmp_path / name, SCHEMES[name])
    quantization, cpu = read_model_config(path).quantization, torch.device("cpu")
    x, prefix = torch.randn(5, 64, generator=torch.Generator().manual_seed(5)), "model.layers.0.mlp"
    results = []
    for ranks in ([Ranks()], [Ranks(OneOf(rank, 2)) for rank in range(2)]):
        parts = []
        for own in ranks:
            weights = CheckpointWeights(Checkpoint(path), torch.float32, cpu, ranks=own, quantization=quantization)
            sizes = {f"{prefix}.gate_proj": 256, f"{prefix}.up_proj": 256}
            gate_up = weights.fused(sizes, 64, bias=False, split=INNER_OUT)
            down = weights.linear(f"{prefix}.down_proj", 64, 256, bias=False, split=INNER_IN)
            assert isinstance(down.product.alone, Fp8ProductOnCpu)
            parts.append(down.product.alone(gate_up.gated(x)))
        results.append(torch.stack(parts).sum(0))
    torch.testing.assert_close(*results)
