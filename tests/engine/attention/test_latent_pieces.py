"""Prompts over latents in the expanded form, in pieces, against the absorbed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.engine.attention import latent_pieces
from baton.engine.attention.attention import RotaryEmbedding, begin_attention
from baton.engine.attention.latent_pieces import LatentPieces, is_faster, piece_size
from baton.engine.checkpoint.model_config import LatentConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.kernels.attention import triton_expanded
from baton.kernels.attention.latents import LatentWeights
from baton.kernels.operations import preferring
from baton.kernels.products.norm import Norm

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


@pytest.mark.parametrize(
    ("latent", "query_lens", "most"),  # `most`: tokens before those of the first sequence, and of the others
    [
        (DEEPSEEK, (64,), (19,)),
        (DEEPSEEK, (100,), (70,)),
        (DEEPSEEK, (90, 40), (6, 33)),
        (LatentConfig(128, None, 64, 32, 64, is_interleaved=True, scale=1.0), (64,), (31,)),  # equally many behind 32
        (LatentConfig(128, None, 100, 32, 60, is_interleaved=True, scale=1.0), (80,), (23,)),
        (LatentConfig(96, None, 70, 10, 90, is_interleaved=True, scale=1.0), (80,), (7,)),
    ],
    ids=str,
)
def test_the_expanded_form_is_taken_up_to_the_last_key_for_which_it_takes_fewer_operations(
    latent: LatentConfig, query_lens: tuple[int, ...], most: tuple[int, ...]
) -> None:
    """Operations counted one token and one key at a time."""

    def operations(first: int) -> tuple[int, int]:
        prefix_lens, expanded, absorbed = (first, *most[1:]), 0, 0
        per_up = latent.rank * (latent.plain_dim + latent.value_dim)
        for query_len, prefix_len in zip(query_lens, prefix_lens, strict=True):
            expanded += (query_len + prefix_len) * per_up
            absorbed += query_len * per_up
            num_pairs = sum(prefix_len + token for token in range(query_len)) + query_len // 2  # half the token itself
            expanded += num_pairs * (latent.plain_dim + latent.rope_dim + latent.value_dim)
            absorbed += num_pairs * (latent.rank + latent.rope_dim + latent.rank)
        return expanded, absorbed

    for first, expected in ((0, True), (most[0], True), (most[0] + 1, False), (most[0] + 2, False)):
        expanded, absorbed = operations(first)
        assert is_faster(latent, query_lens, (first, *most[1:])) == (expanded < absorbed) == expected, first
    assert is_faster(latent, (64,), (0,)) and not is_faster(latent, (63,), (0,)), "launches take longer"


def test_a_piece_has_as_many_whole_units_as_its_memory_holds_and_one_at_least() -> None:
    sizes = [piece_size(DEEPSEEK, *each) for each in ((128, 2), (128, 4), (3, 4), (10**4, 2), (10**6, 4))]
    assert sizes == [4096, 2048, 87360, 64, 64]
    assert piece_size(SMALL, 3, 4) == 508352


def test_pieces_are_made_only_of_prompts_whose_lengths_the_host_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And if `is_faster` says so of these lengths."""
    asked: list[Any] = []
    monkeypatch.setattr(latent_pieces, "is_faster", lambda *given: asked.append(given) or len(asked) == 1)
    prompts = ForwardBatch.build([BatchRow([0] * 3, 7, [5, 9, 2]), BatchRow([0] * 6, 0, [3, 8])], PAGE_SIZE, "cpu")
    assert LatentPieces.of(prompts, SMALL, NUM_HEADS, 4) is not None
    assert LatentPieces.of(prompts, SMALL, NUM_HEADS, 4) is None
    assert asked == [(SMALL, (3, 6), (7, 0))] * 2
    ones = torch.ones(1, 1, dtype=torch.int64)
    batch = ForwardBatch.uniform(ones, ones, ones[0], ones, PAGE_SIZE)
    assert LatentPieces.of(batch, SMALL, NUM_HEADS, 4) is None and len(asked) == 2


@pytest.mark.each_value
@pytest.mark.parametrize("piece", [8, 20, 4096])  # keys
@pytest.mark.parametrize(
    "lens",  # of each sequence: tokens before the new ones, and new ones
    [((13, 20), (0, 7), (30, 1), (4, 25)), ((0, 9), (0, 30)), ((0, 17),)],
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
            context = begin_attention(config, rotary, batch, ModelPools(kv), kv.dtype)
            outs.append(context.attend_latents(1, q.clone(), stored.clone(), weights))
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


def test_keys_of_new_prompts_are_read_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 3 and 6 keys, all new, need no pages; pieces of 4."""
    monkeypatch.setattr(latent_pieces, "is_faster", lambda *_: True)
    monkeypatch.setattr(latent_pieces, "_UNIT", 4)
    monkeypatch.setattr(latent_pieces, "_PIECE_BYTES", 4 * NUM_HEADS * 44 * 4)
    rows = [BatchRow([0] * 3, 0, [5]), BatchRow([0] * 6, 0, [3, 8])]
    found = LatentPieces.of(ForwardBatch.build(rows, PAGE_SIZE, "cpu"), SMALL, NUM_HEADS, 4)
    assert found is not None
    assert [(each.first, each.stop, each.rows) for each in found.pieces] == [(0, 4, None), (4, 8, None), (8, 9, None)]
    assert [each.starts.tolist() for each in found.pieces] == [[0, 3, 4], [0, 0, 4], [0, 0, 1]]
    assert [each.offsets.tolist() for each in found.pieces] == [[0, 0], [-3, -1], [-3, -5]]
    assert (
        {each.starts.dtype for each in found.pieces} == {each.offsets.dtype for each in found.pieces} == {torch.int32}
    )


def test_pieces_are_summed_in_float32_with_the_given_tiles_and_returned_in_the_models_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent_pieces, "is_faster", lambda *_: True)
    monkeypatch.setattr(latent_pieces, "_UNIT", 4)
    monkeypatch.setattr(latent_pieces, "_PIECE_BYTES", 4 * NUM_HEADS * 44 * 4)
    log: list[Any] = []
    monkeypatch.setattr(
        triton_expanded,
        "expanded_attention",
        lambda q, keys, starts, plain_dim, scale, out, lse, tiles: log.append((out.dtype, lse.dtype, tiles)),
    )
    batch, tiles = ForwardBatch.build([BatchRow([0] * 6, 0, [3, 8])], PAGE_SIZE, "cpu"), object()
    found = LatentPieces.of(batch, SMALL, NUM_HEADS, 4)
    assert found is not None
    q, latents = torch.ones(6, NUM_HEADS, 36).bfloat16(), torch.ones(6, 56).bfloat16()
    up = torch.ones(NUM_HEADS, SMALL.plain_dim + SMALL.value_dim, SMALL.rank).bfloat16()
    weights = LatentWeights(Norm(torch.ones(SMALL.rank), 1e-6), up, SMALL.plain_dim, is_interleaved=True)
    given: Any = tiles
    out = found.attend(q, latents, torch.ones(9, 1, 1, PAGE_SIZE, 56).bfloat16(), weights, 0.1, given)
    assert (out.dtype, out.shape) == (torch.bfloat16, (6, NUM_HEADS * SMALL.value_dim))
    assert log == [(torch.float32, torch.float32, tiles)] * 2


def weights_of() -> LatentWeights:
    up = random(NUM_HEADS, SMALL.plain_dim + SMALL.value_dim, SMALL.rank, seed=1)
    return LatentWeights(Norm(random(SMALL.rank, seed=2), 1e-6), up, SMALL.plain_dim, is_interleaved=True)
