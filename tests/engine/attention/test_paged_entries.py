"""Attention to windows and entries of a whole model by kernels of a GPU, in Triton's interpreter if there is none, and
in plain torch: the same logits for prompts, chunks, rounds and two batches in one forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton_device
from model_pools import pools_of

pytest.importorskip("triton")

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch, MixedBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.kernels.operations import preferring

PAGE_SIZE, NUM_PAGES = 8, 20
IDS = random.Random(0).choices(range(1, 512), k=60)
PAGES, TAIL = [5, 3, 9, 12, 1, 8], [4, 6, 2, 7, 4, 6]
OTHER, OTHER_TAIL = [10, 4, 6, 11], [1, 3, 5, 8]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> DecoderModel:
    """Two layers with entries, whose window is shorter than a page; the first chooses 3 of them."""
    path = checkpoint(
        "deepseek_v4",
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=16,
        layer_types=[f"{kind}_attention" for kind in ("compressed_sparse", "heavily_compressed")],
        mlp_layer_types=["hash_moe", "moe"],
        n_routed_experts=3,
        num_experts_per_tok=2,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        index_topk=3,
    )
    return load_model(path, read_model_config(path).with_tail(), torch.float32, triton_device.DEVICE)


def outputs(model: DecoderModel) -> list[torch.Tensor]:
    """Return the states of some forwards of two sequences, whose pages hold NaN at first."""
    device, config = model.device, model.config
    own = pools_of(config, PAGE_SIZE, NUM_PAGES, float("nan"))
    pools = ModelPools(own.kv.to(device), {name: each.to(device) for name, each in own.further.items()})

    def run(batch: ForwardBatch | MixedBatch) -> torch.Tensor:
        return model.forward_with_aux(batch, pools, ()).final.cpu()

    def built(*rows: BatchRow) -> ForwardBatch:
        return ForwardBatch.build(rows, PAGE_SIZE, device)

    def round_of(num_new: int, *ends: int) -> ForwardBatch:
        starts = [end - num_new for end in ends]
        return ForwardBatch.uniform(
            torch.tensor([IDS[start : start + num_new] for start in starts], device=device),
            torch.tensor([list(range(start, start + num_new)) for start in starts], device=device),
            torch.tensor(ends, device=device),
            torch.tensor([PAGES, [*OTHER, 0, 0]][: len(ends)], device=device),
            PAGE_SIZE,
            tail_table=torch.tensor([TAIL, [*OTHER_TAIL, 0, 0]][: len(ends)], device=device),
        )

    def row(first: int, stop: int) -> BatchRow:
        return BatchRow(IDS[first:stop], first, PAGES, tail=TAIL)

    prompts = built(row(0, 22), BatchRow(IDS[:6], 0, OTHER, tail=OTHER_TAIL))
    chunk = built(row(22, 26))
    mixed = MixedBatch.of(round_of(1, 32), built(row(26, 31), BatchRow(IDS[:9], 0, [16, 17], tail=[9, 10])))
    batches = [prompts, chunk, mixed, round_of(3, 34, 9), round_of(3, 33, 10)]
    return [run(batch) for batch in batches]


def test_the_kernels_of_a_gpu_attend_to_what_torch_does(model: DecoderModel) -> None:
    with preferring("reference"):
        expected = outputs(model)
    assert all(each.isfinite().all() for each in expected)
    with preferring("triton"):
        found = outputs(model)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
