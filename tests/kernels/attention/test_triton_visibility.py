"""The keys that each row sees, by the kernels' functions and by plain loops."""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from baton.kernels.attention.triton_visibility import in_window, pack, seen_in_tree, span


def random_mask(num_rows: int, num_columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_columns)
    return torch.rand(num_rows, num_columns, generator=generator) < 0.5


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 16, 17])
@pytest.mark.parametrize("num_columns", [1, 7, 63, 64, 65, 200])
def test_pack(num_tokens: int, num_columns: int) -> None:
    """Bit i of word w is column 64 w + i. Bits beyond the columns are 0."""
    visible = random_mask(num_tokens, num_columns)
    words = pack(visible.to(DEVICE), num_tokens)
    assert words.shape == (num_tokens, -(-num_columns // 64)) and words.dtype == torch.int64
    expected = [sum(1 << i for i, is_seen in enumerate(row) if is_seen) for row in visible.tolist()]
    ours = [sum((word % 2**64) << (64 * w) for w, word in enumerate(row)) for row in words.tolist()]
    assert ours == expected


@triton.jit
def seen_kernel(out_ptr, words_ptr, first, end, tree_start, num_words, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid: (1,). Store what ROWS rows see of slots first .. first + BLOCK_N - 1: [ROWS, BLOCK_N] int32."""
    rows, keys = tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    slots = first + keys
    is_seen = seen_in_tree(words_ptr + rows * num_words, slots, slots < end, first, tree_start, num_words)
    tl.store(out_ptr + rows[:, None] * BLOCK_N + keys[None, :], is_seen.to(tl.int32))


@pytest.mark.parametrize("num_columns", [3, 64, 130])
@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("tree_start", [0, 1, 37, 64, 100])
def test_what_is_seen_in_a_tree(tree_start: int, block_n: int, num_columns: int) -> None:
    """All slots before the tree, those of the tree by its mask, and none from the sequence's end on, in every tile."""
    num_rows, end = 4, tree_start + num_columns - 1
    visible = random_mask(num_rows, num_columns)
    words = pack(visible.to(DEVICE), num_rows)
    for first in range(0, end + block_n, block_n):
        out = torch.empty(num_rows, block_n, dtype=torch.int32, device=DEVICE)
        seen_kernel[(1,)](out, words, first, end, tree_start, words.shape[1], ROWS=num_rows, BLOCK_N=block_n)
        expected = [
            [slot < end and (slot < tree_start or row[slot - tree_start]) for slot in range(first, first + block_n)]
            for row in visible.tolist()
        ]
        assert out.tolist() == expected


@triton.jit
def window_kernel(
    out_ptr, positions_ptr, lowest_ptr, first_token, first, end, first_new,
    IS_TREE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (1,). Store `in_window` of slots first .. first + BLOCK_N - 1: [ROWS, BLOCK_N] int32."""
    rows, keys = tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    lowest, slots = tl.load(lowest_ptr + rows), first + keys
    is_in = in_window(positions_ptr, first_token, slots, slots < end, first_new, lowest, IS_TREE)
    tl.store(out_ptr + rows[:, None] * BLOCK_N + keys[None, :], is_in.to(tl.int32))


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("first", [0, 16])
def test_the_window(first: int, is_tree: bool) -> None:
    """An old slot's position is its number. A new node's is its depth in the tree, which starts anywhere."""
    first_new, num_new, first_token = 9, 11, 5  # of this sequence; the tokens of another come before
    end = first_new + num_new
    positions = torch.randint(4, 14, (first_token + num_new,), generator=torch.Generator().manual_seed(first))
    lowest = torch.tensor([-3, 0, 6, 13], dtype=torch.int32)
    out = torch.empty(4, 16, dtype=torch.int32, device=DEVICE)
    window_kernel[(1,)](
        out, positions.to(DEVICE), lowest.to(DEVICE), first_token, first, end, first_new,
        IS_TREE=is_tree, ROWS=4, BLOCK_N=16,
    )  # fmt: skip
    slots = range(first, min(end, first + 16))
    depths = [
        int(positions[first_token + slot - first_new]) if is_tree and slot >= first_new else slot for slot in slots
    ]
    assert out[:, : len(slots)].tolist() == [[depth >= low for depth in depths] for low in lowest.tolist()]


@triton.jit
def span_kernel(
    out_ptr, lowest_ptr, positions_ptr, last_seen_ptr, seq_len, window, num_splits,
    IS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (num_splits). Store (begin, end) of each split, [num_splits, 2], and `lowest` [ROWS]; int32."""
    rows, split = tl.arange(0, ROWS), tl.program_id(0)
    last_seen = tl.load(last_seen_ptr + rows)
    begin, end, lowest = span(
        positions_ptr, rows, last_seen, seq_len, window, split, num_splits, IS_TREE, HAS_WINDOW, BLOCK_N
    )
    tl.store(out_ptr + split * 2, begin)
    tl.store(out_ptr + split * 2 + 1, end)
    tl.store(lowest_ptr + rows, lowest)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 9])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("window", [None, 1, 20, 1000])
@pytest.mark.parametrize("seq_len", [4, 16, 75, 100])
def test_splits_cover_what_rows_see(seq_len: int, window: int | None, is_tree: bool, num_splits: int) -> None:
    """Four new tokens. Splits follow one another, in whole tiles, from the tile of the first slot that a row sees to
    the last slot that one sees; all but the last with keys have equal numbers of tiles."""
    num_rows, block_n = 4, 16
    last_seen = list(range(seq_len - num_rows, seq_len))
    positions = [seq_len - 4, seq_len - 3, seq_len - 3, seq_len - 2]  # a root, two children, a grandchild
    out = torch.empty(num_splits, 2, dtype=torch.int32, device=DEVICE)
    lowest = torch.empty(num_rows, dtype=torch.int32, device=DEVICE)
    span_kernel[(num_splits,)](
        out, lowest, torch.tensor(positions, device=DEVICE),
        torch.tensor(last_seen, dtype=torch.int32, device=DEVICE), seq_len, window or 0, num_splits,
        IS_TREE=is_tree, HAS_WINDOW=window is not None, ROWS=num_rows, BLOCK_N=block_n,
    )  # fmt: skip
    places = positions if is_tree else last_seen
    lows = [0] * num_rows if window is None else [place - window + 1 for place in places]
    assert lowest.tolist() == lows
    first = max(0, min(lows)) // block_n * block_n
    num_tiles = -(-(seq_len - first) // block_n)
    share = -(-num_tiles // num_splits) * block_n
    begins = [first + split * share for split in range(num_splits)]
    assert out.tolist() == [[begin, min(seq_len, begin + share)] for begin in begins]


def test_rows_that_see_nothing_have_no_span() -> None:
    """The rows of padding, whose sequence of length 0 ends before they begin."""
    out, lowest = torch.empty(1, 2, dtype=torch.int32, device=DEVICE), torch.empty(4, dtype=torch.int32, device=DEVICE)
    last_seen = torch.tensor([-4, -3, -2, -1], dtype=torch.int32, device=DEVICE)
    span_kernel[(1,)](
        out, lowest, lowest, last_seen, 0, 0, 1, IS_TREE=False, HAS_WINDOW=False, ROWS=4, BLOCK_N=16
    )  # fmt: skip
    assert out.tolist() == [[0, 0]]
