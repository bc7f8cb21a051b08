"""Prompts over latents in the expanded form, in pieces, against the absorbed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.engine import latent_pieces
from baton.engine.attention import attend_latents, begin_attention
from baton.engine.batch import ForwardBatch
from baton.engine.latent_pieces import LatentPieces, is_faster
from baton.engine.model_config import LatentConfig
from baton.engine.models.read_config import read_model_config
from baton.engine.rope import RotaryEmbedding
from baton.engine.work import BatchRow
from baton.kernels.latents import LatentWeights
from baton.kernels.norm import Norm
from baton.kernels.operations import preferring

DEEPSEEK = LatentConfig(512, None, 128, 64, 128, is_interleaved=True, scale=0.1)
SMALL = LatentConfig(40, None, 20, 16, 24, is_interleaved=True, scale=0.07)
PAGE_SIZE, NUM_HEADS = 4, 3


@pytest.mark.parametrize(
    ("query_lens", "prefix_lens", "expected"),
    [
        ((1024,), (0,), True),
        ((16,) * 4, (0,) * 4, True),
        ((16,), (0,), False),  # launches take longer
        ((1024,), (8192,), True),
        ((400, 1), (8192, 300), True),
        ((100,), (8192,), False),  # to expand the others takes more operations
        ((1,) * 256, (1000,) * 256, False),
    ],
    ids=str,
)
def test_the_form_depends_on_lengths(query_lens: tuple[int, ...], prefix_lens: tuple[int, ...], expected: bool) -> None:
    assert is_faster(DEEPSEEK, query_lens, prefix_lens) == expected


@pytest.mark.parametrize("piece", [8, 20, 4096])  # keys
@pytest.mark.parametrize(
    "lens",  # of each sequence: tokens before the new ones, and new ones
    [((0, 17),), ((0, 9), (0, 30)), ((13, 20), (0, 7), (30, 1), (4, 25))],
    ids=str,
)
def test_both_forms_bring_the_same(
    lens: tuple[tuple[int, int], ...],
    piece: int,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(read_model_config(checkpoint("deepseek_v3")), latent=SMALL, num_heads=NUM_HEADS, head_dim=56)
    rotary, weights = RotaryEmbedding(config.rope, 16, torch.device(DEVICE)), weights_of()
    pages = iter(torch.randperm(99).add(1).tolist())
    rows = [
        BatchRow([0] * num_new, num_before, [next(pages) for _ in range(-(-(num_before + num_new) // PAGE_SIZE))])
        for num_before, num_new in lens
    ]
    batch = ForwardBatch.build(rows, PAGE_SIZE, DEVICE)
    q, stored = random(batch.num_tokens, NUM_HEADS, 36, seed=4), random(batch.num_tokens, 56, seed=5)
    monkeypatch.setattr(latent_pieces, "_UNIT", 4)
    monkeypatch.setattr(latent_pieces, "_PIECE_BYTES", piece * NUM_HEADS * 44 * 4)
    outs: list[torch.Tensor] = []
    for is_expanded in (True, False):
        kv = random(config.num_layers, 100, 1, 1, PAGE_SIZE, 56, seed=6)
        with preferring("triton"):
            monkeypatch.setattr(latent_pieces, "is_faster", lambda *_, found=is_expanded: found)
            context = begin_attention(config, rotary, batch, kv, kv.dtype)
            outs.append(attend_latents(context, 1, q.clone(), stored.clone(), weights))
    torch.testing.assert_close(outs[0], outs[1], atol=2e-5, rtol=2e-5)


def test_pieces_hold_all_keys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 10 keys, 3 of them new, and of 6 new ones; pieces of 8."""
    monkeypatch.setattr(latent_pieces, "is_faster", lambda *_: True)
    monkeypatch.setattr(latent_pieces, "_UNIT", 4)
    monkeypatch.setattr(latent_pieces, "_PIECE_BYTES", 8 * NUM_HEADS * 44 * 4)
    rows = [BatchRow([0] * 3, 7, [5, 9, 2]), BatchRow([0] * 6, 0, [3, 8])]
    found = LatentPieces.of(ForwardBatch.build(rows, PAGE_SIZE, "cpu"), SMALL, NUM_HEADS, 4)
    assert found is not None
    assert found.starts.tolist() == [0, 3, 9]
    first, second = found.pieces
    assert (first.first, first.stop, first.starts.tolist(), first.offsets.tolist()) == (0, 8, [0, 8, 8], [7, 0])
    assert (second.first, second.stop, second.starts.tolist(), second.offsets.tolist()) == (8, 16, [0, 2, 8], [-1, 0])
    assert first.rows is not None and first.rows.tolist() == [20, 21, 22, 23, 36, 37, 38, 39]
    assert second.rows is not None and second.rows.tolist() == [8, 9, 12, 13, 14, 15, 32, 33]


def weights_of() -> LatentWeights:
    up = random(NUM_HEADS, SMALL.plain_dim + SMALL.value_dim, SMALL.rank, seed=1)
    return LatentWeights(Norm(random(SMALL.rank, seed=2), 1e-6), up, SMALL.plain_dim, is_interleaved=True)
