"""Attention to windows and entries by Triton against its formula, on a GPU if there is one, otherwise in the
interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

from baton.kernels.attention.picks import PickedRows
from baton.kernels.entries.entries import attend_rows, rotate_pairs_
from baton.kernels.entries.paged_entries import EntryRows, TokenPlan
from baton.kernels.entries.triton_attend import AttendTiles, attend_entries

PAGE_SIZE, RATE, WIDTH, HEADS, WINDOW = 8, 4, 40, 5, 11
SLOTS = [0, 2, 7, 23, 30, -1]  # of one token each; the last one is padding
DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
FREQUENCIES = torch.tensor([1.0, 0.3, 0.1])


def plan_of(slots: list[int]) -> TokenPlan:
    generator, num = torch.Generator().manual_seed(0), len(slots)
    table, tails = (1 + torch.randperm(4 * num, generator=generator).view(num, 4) for _ in range(2))
    numbers = torch.arange(num, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    each = (*numbers, numbers[1], numbers[1] + 1, table, tails, torch.zeros(num, dtype=torch.int32))
    return TokenPlan(*(one.to(DEVICE) for one in each))


def rows_of(layer: Tensor, table: Tensor, slots: Tensor) -> Tensor:
    return layer[table.cpu()[slots // layer.shape[3]].to(DEVICE), 0, 0, (slots % layer.shape[3]).to(DEVICE)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["window", "all", "picked"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_token_attends_to_its_window_and_to_entries(num_splits: int, kind: str, dtype: torch.dtype) -> None:
    plan, num = plan_of(SLOTS), len(SLOTS)
    keys = random(25, 1, 1, PAGE_SIZE, WIDTH, dtype=dtype, seed=1)
    entries = random(25, 1, 1, PAGE_SIZE, WIDTH // RATE, dtype=dtype, seed=2)
    q, sinks = random(num, HEADS, WIDTH, dtype=dtype, seed=3, scale=2.0), random(HEADS, seed=4)
    own = entries.view(25, 1, 1, PAGE_SIZE // RATE, WIDTH)
    picks = torch.full((num, 3), -1, dtype=torch.int64)
    counts, expected = torch.zeros(num, dtype=torch.int64), torch.zeros_like(q)
    for token, slot in enumerate(SLOTS[:-1]):
        seen = rows_of(keys, plan.tail_table[token], torch.arange(max(0, slot - WINDOW + 1), slot + 1))
        visible = torch.arange((slot + 1) // RATE)
        if kind == "picked":
            visible = visible[::2][:3]
            counts[token] = len(visible)
            places = plan.table[token].cpu()[visible // (PAGE_SIZE // RATE)] * (PAGE_SIZE // RATE)
            picks[token, : len(visible)] = places + visible % (PAGE_SIZE // RATE)
        if kind != "window":
            seen = torch.cat([seen, rows_of(own, plan.table[token], visible)])
        is_seen = torch.ones(1, len(seen), dtype=torch.bool, device=DEVICE)
        out = attend_rows(q[token : token + 1].float(), seen.float(), is_seen, sinks, WIDTH**-0.5)
        angles = (slot * FREQUENCIES).view(1, 1, -1).to(DEVICE)
        rotate_pairs_(out, angles.cos(), -angles.sin())
        expected[token] = out[0].to(dtype)
    picked = PickedRows(picks.to(DEVICE), counts.to(DEVICE)) if kind == "picked" else None
    seen_entries = None if kind == "window" else EntryRows(entries, RATE, picked)
    tiles = AttendTiles(16, 16, num_splits, 4, 1)
    found = attend_entries(q, keys, seen_entries, sinks, FREQUENCIES.to(DEVICE), WINDOW, plan, tiles)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)
