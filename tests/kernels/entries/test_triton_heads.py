"""Norms, rotation and store of heads by Triton against their formulas, on a GPU if there is one, otherwise in the
interpreter."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.entries.entries import rotate_pairs_
from baton.kernels.entries.paged_entries import HeadTurns, TokenPlan
from baton.kernels.entries.triton_heads import turn_heads_
from baton.kernels.products.norm import Norm, rms_norm_ref

PAGE_SIZE, WIDTH, HEADS = 8, 36, 3
FREQUENCIES = torch.tensor([1.0, 0.3, 0.1], device=DEVICE)


def plan_of(num_new: int) -> TokenPlan:
    """Return the plan of two sequences. The first one has no place for its last token."""
    lens = torch.tensor([PAGE_SIZE * 2 + 1, num_new + 3], device=DEVICE)
    table = torch.tensor([[5, 3], [2, 7]], device=DEVICE)
    paged = PagedPlan.uniform(table, lens, num_new, PAGE_SIZE, is_stored=True)
    return TokenPlan.of(paged, table.flip(1), 2 * num_new, PAGE_SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_heads_are_normed_and_rotated_and_keys_stored(dtype: torch.dtype) -> None:
    plan, num = plan_of(2), 4
    q, both = random(num, HEADS, WIDTH, dtype=dtype), random(num, 5 + WIDTH, dtype=dtype, seed=1)
    turns = HeadTurns(FREQUENCIES, 1e-6, Norm(random(WIDTH, seed=2), 1e-5))
    pages = torch.full((8, 1, 1, PAGE_SIZE, WIDTH), float("nan"), dtype=dtype, device=DEVICE)
    assert turns.key_norm is not None
    key, slots = rms_norm_ref(both[:, 5:], *turns.key_norm).unsqueeze(1), [15, -1, 3, 4]
    assert plan.slots.tolist() == slots and plan.firsts.tolist() == [15, 15, 3, 3]
    angles = plan.slots.clamp(min=0).float().view(-1, 1, 1) * FREQUENCIES
    expected = q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + 1e-6).to(dtype)
    for each in (expected, key):
        rotate_pairs_(each, angles.cos(), angles.sin())
    turn_heads_(q, both[:, 5:], turns, pages, plan)
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(q, expected, atol=bound, rtol=bound)
    for token, page in ((0, 5), (2, 7), (3, 7)):
        torch.testing.assert_close(pages[page, 0, 0, slots[token] % PAGE_SIZE], key[token, 0], atol=bound, rtol=bound)
    assert int((~pages.isnan()).any(-1).sum()) == 3


def test_queries_of_many_tokens_share_programs() -> None:
    num = 70
    table = torch.arange(1, 11, device=DEVICE)[None]
    paged = PagedPlan.uniform(table, torch.tensor([num], device=DEVICE), num, PAGE_SIZE, is_stored=True)
    q = random(num, HEADS, WIDTH)
    expected, angles = q.clone(), torch.arange(num, device=DEVICE).view(-1, 1, 1) * FREQUENCIES
    rotate_pairs_(expected, angles.cos(), angles.sin())
    turn_heads_(q, None, HeadTurns(FREQUENCIES), None, TokenPlan.of(paged, table, num, PAGE_SIZE))
    torch.testing.assert_close(q, expected, atol=1e-5, rtol=1e-5)
