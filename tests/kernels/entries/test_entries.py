"""Entries that stand for several tokens: their formula, and what a token sees of them."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.entries.entries import attend_rows, compress, rotate_pairs_, window_sums
from baton.kernels.products.norm import Norm, rms_norm

WIDTH, RATE = 6, 4


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_before", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_an_entry_is_the_softmax_of_each_column(*, overlaps: bool, has_before: bool) -> None:
    columns, num = (2 if overlaps else 1) * WIDTH, 3
    has_before = has_before and overlaps
    rows, bias = random((num + has_before) * RATE, 2 * columns, seed=0), random(RATE, columns, seed=1)
    norm = Norm(random(WIDTH, seed=2), 1e-6)
    entries = compress(rows, bias, norm, has_before=has_before)
    assert entries.shape == (num, WIDTH)
    kv, gate = rows[:, :columns], rows[:, columns:]
    for window in range(num):
        own = window + has_before
        expected = torch.empty(WIDTH)
        for column in range(WIDTH):
            last = column + (WIDTH if overlaps else 0)
            slots = [(own * RATE + j, last, j) for j in range(RATE)]
            if overlaps and own > 0:
                slots += [((own - 1) * RATE + j, column, j) for j in range(RATE)]
            weights = torch.tensor([gate[row, at] + bias[j, at] for row, at, j in slots]).softmax(0)
            expected[column] = sum(weight * kv[row, at] for weight, (row, at, _) in zip(weights, slots, strict=True))
        expected = expected * (expected.square().mean() + 1e-6).rsqrt() * norm.weight
        torch.testing.assert_close(entries[window], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [[11], [1] * 11, [3, 1, 5, 2]], ids=str)
def test_sums_of_windows_are_the_same_however_a_text_is_divided(chunks: list[int]) -> None:
    """Bit for bit. At the end of a window they are its entry before the norm."""
    rows, bias = random(11, 2 * WIDTH, seed=0), random(RATE, WIDTH, seed=1)
    whole, start, before = window_sums(rows, bias, 0, None), 0, None
    for num in chunks:
        sums = window_sums(rows[start : start + num], bias, start, before)
        assert torch.equal(sums, whole[start : start + num])
        start += num
        before = sums[-1] if start % RATE else None
    norm = Norm(random(WIDTH, seed=2), 1e-6)
    expected = compress(rows[: 2 * RATE], bias, norm, has_before=False)
    torch.testing.assert_close(rms_norm(whole[RATE - 1 :: RATE, :WIDTH], *norm), expected, atol=1e-6, rtol=1e-5)


def test_sums_of_windows_take_gates_of_any_size() -> None:
    rows = torch.tensor([[1.0, 3e4], [2.0, -3e4], [3.0, -3e4], [5.0, 3e4]])
    assert window_sums(rows, torch.zeros(4, 1), 0, None)[:, 0].tolist() == [1, 1, 1, 3]


def test_an_entry_does_not_depend_on_the_windows_beside_it() -> None:
    """Bit for bit, or texts would depend on how a prompt is divided."""
    rows, bias, norm = (
        random(8 * RATE, 4 * WIDTH, seed=0),
        random(RATE, 2 * WIDTH, seed=1),
        Norm(torch.ones(WIDTH), 1e-6),
    )
    whole = compress(rows, bias, norm, has_before=False)
    for window in range(1, 8):
        alone = compress(rows[(window - 1) * RATE : (window + 1) * RATE], bias, norm, has_before=True)
        assert torch.equal(alone[0], whole[window])


def test_a_rotation_is_undone_by_that_of_the_opposite_sign() -> None:
    x = random(3, 2, 8, seed=0)
    angles = random(3, 1, 2, seed=1)
    turned = x.clone()
    rotate_pairs_(turned, angles.cos(), angles.sin())
    assert torch.equal(turned[..., :4], x[..., :4])
    first = torch.view_as_complex(x[..., 4:].reshape(3, 2, 2, 2).contiguous())
    expected = torch.view_as_real(first * torch.polar(torch.ones_like(angles), angles)).flatten(2)
    torch.testing.assert_close(turned[..., 4:], expected)
    rotate_pairs_(turned, angles.cos(), -angles.sin())
    torch.testing.assert_close(turned, x)


def test_a_row_that_is_not_seen_has_no_influence_even_if_it_is_not_a_number() -> None:
    q, kv, sinks = random(2, 3, WIDTH, seed=0), random(5, WIDTH, seed=1), random(3, seed=2)
    seen = torch.tensor([[True, False, True, False, True], [True, True, True, False, False]])
    expected = attend_rows(q, kv, seen, sinks, 0.5)
    bad = kv.clone()
    bad[3] = float("nan")
    assert torch.equal(attend_rows(q, bad, seen, sinks, 0.5), expected)
    bad[1] = float("nan")
    found = attend_rows(q, bad, seen, sinks, 0.5)
    assert torch.equal(found[0], expected[0]) and found[1].isnan().all()


def test_a_sink_takes_its_part_of_the_weights() -> None:
    q, kv = torch.zeros(1, 2, WIDTH), torch.ones(3, WIDTH)
    seen = torch.tensor([[True, True, False]])
    out = attend_rows(q, kv, seen, torch.tensor([0.0, float("-inf")]), 1.0)
    torch.testing.assert_close(out[0, 0], torch.full((WIDTH,), 2 / 3))
    torch.testing.assert_close(out[0, 1], torch.ones(WIDTH))
