"""Sparse attention of a whole model by kernels of a GPU, in Triton's interpreter if there is none, and by those of a
CPU: the same logits for prompts, chunks, steps, trees and two batches in one forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton_device

pytest.importorskip("triton")

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch, MixedBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.kernels.attention.attention import Tree
from baton.kernels.operations import preferring

PAGE_SIZE, NUM_PAGES = 4, 20
IDS = random.Random(0).choices(range(1, 512), k=40)
PAGES = [5, 3, 9, 12, 1, 8, 7, 15, 2]
OTHER = [10, 4, 6, 11, 13]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> DecoderModel:
    """Two layers, of which the second attends to what the first picks: 5 tokens."""
    path = checkpoint("glm_moe_dsa", num_hidden_layers=2, indexer_types=["full", "shared"], index_topk=5)
    return load_model(path, read_model_config(path), torch.float32, triton_device.DEVICE)


def outputs(model: DecoderModel) -> list[torch.Tensor]:
    """Return the logits of some forwards of two sequences."""
    device, config = model.device, model.config
    kv = torch.full((2, NUM_PAGES, 1, 1, PAGE_SIZE, config.head_dim), float("nan"), device=device)
    keys = torch.full((1, NUM_PAGES, 1, 1, PAGE_SIZE, 24), float("nan"), device=device)
    pools = ModelPools(kv, {"index": keys})

    def run(batch: ForwardBatch | MixedBatch) -> torch.Tensor:
        return model.logits(model.forward_with_aux(batch, pools, ()).final).cpu()

    def built(*rows: BatchRow) -> ForwardBatch:
        return ForwardBatch.build(rows, PAGE_SIZE, device)

    prompts = built(BatchRow(IDS[:19], 0, PAGES), BatchRow(IDS[20:27], 0, OTHER))
    chunk = built(BatchRow(IDS[19:22], 19, PAGES), BatchRow(IDS[27:28], 7, OTHER))
    step = ForwardBatch.uniform(
        torch.tensor([[IDS[22]], [IDS[28]]], device=device),
        torch.tensor([[22], [8]], device=device),
        torch.tensor([23, 9], device=device),
        torch.tensor([PAGES[:6], [*OTHER, 0]], device=device),
        PAGE_SIZE,
    )
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]] * 2, dtype=torch.bool)
    tree = ForwardBatch.uniform(
        torch.tensor([IDS[30:34], IDS[34:38]], device=device),
        torch.tensor([[23, 24, 24, 25], [9, 10, 10, 11]], device=device),
        torch.tensor([27, 13], device=device),
        torch.tensor([PAGES[:7], [*OTHER, 0, 0]], device=device),
        PAGE_SIZE,
        Tree(torch.tensor([23, 9], device=device), visible.to(device)),
    )
    mixed = MixedBatch.of(step, built(BatchRow(IDS[3:9], 0, [16, 17])))
    return [run(batch) for batch in (prompts, chunk, step, tree, mixed)]


def test_the_kernels_of_a_gpu_attend_to_what_those_of_a_cpu_do(model: DecoderModel) -> None:
    with preferring("reference"):
        expected = outputs(model)
    assert all(each.isfinite().all() for each in expected)
    with preferring("triton"):
        found = outputs(model)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
