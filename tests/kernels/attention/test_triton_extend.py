"""`extend_attention` by Triton against the specification of attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from large_pool import (
    IN_A_FILE,
    LENS,
    PAGE_SIZE,
    SEQ_LEN,
    SMALL_TABLE,
    TABLE,
    WRAPS,
    make_large_pool,
    make_queries,
    small_pool,
)
from thinned import every
from triton_device import DEVICE

pytest.importorskip("triton")

from attention_case import HEADS_IN_DTYPES, NOT_NUMBERS, ODD_SHAPES, Case, assert_spoils_only

from baton.kernels.attention import triton_extend
from baton.kernels.attention.attention import paged_attention_ref
from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.triton_extend import ExtendTiles, extend_attention
from baton.kernels.state.fp8_pages import scales_of


@pytest.mark.parametrize(("page_size", "heads"), [(1, (3, 1)), (3, (2, 2)), (16, (8, 2)), (64, (3, 1))], ids=str)
def test_chunks(page_size: int, heads: tuple[int, int]) -> None:
    """Ragged: fresh prompts, chunks over a prefix, a decode step, and whole tiles of keys that need no mask."""
    query_lens, seq_lens = (21, 1, 7, 30), (21, 9, 60, 54)
    case = Case(query_lens, seq_lens, heads, page_size=page_size)
    case.check(case.extend(block_m=32, block_n=16))


@pytest.mark.parametrize(
    ("window", "page_size", "query_len"), [(1, 16, 1), (1, 3, 5), (6, 3, 1), (20, 16, 5), (1000, 3, 5)]
)
def test_windows(window: int, page_size: int, query_len: int) -> None:
    case = Case((query_len,) * 2, (query_len, 75), (2, 1), page_size=page_size)
    case.check(case.extend(window, block_n=16), window)


@pytest.mark.parametrize(("window", "dims"), [(None, (24, 16)), (20, (72, 10))])
def test_values_narrower_than_keys(window: int | None, dims: tuple[int, int]) -> None:
    case = Case((21, 1, 7), (21, 90, 160), (6, 2), dims[0], 4, value_dim=dims[1])
    out = case.extend(window, block_m=16, block_n=16)
    case.check(out, window)
    assert not out[..., dims[1] :].any() and out[..., dims[1] - 1].any()


@pytest.mark.each_value
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_count_once(window: int | None, is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_extend, "_MIN_SPLIT", 32)
    case = Case((21, 1, 0, 7), (21, 90, 0, 160), (6, 2), page_size=4)
    sinks = case.sinks()
    sizes = {"num_slots": 20 if is_shared else 1, "block_m": 16, "block_n": 16}
    case.check(case.extend(window, sinks, **sizes), window, sinks)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_hidden_number_that_is_none_spoils_no_sink() -> None:
    case = Case((5, 5), (60, 40), (2, 1), page_size=10)
    sinks, slot = case.sinks(), 57
    clean = case.extend(None, sinks, block_m=16, block_n=16)
    case.kv[case.table[0, slot // 10], :, :, slot % 10] = float("nan")
    sees = torch.tensor([False, False, True, True, True] + [False] * 5, device=DEVICE)
    assert_spoils_only(case.extend(None, sinks, block_m=16, block_n=16), clean, sees, 1, float("nan"))


@pytest.mark.parametrize(("head_dim", "dtype"), HEADS_IN_DTYPES, ids=str)
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    case = Case((3, 3), (40, 9), (2, 1), head_dim=head_dim, dtype=dtype)
    out = case.extend()
    assert out.dtype == dtype and out.is_contiguous()
    case.check(out)


@pytest.mark.parametrize(("page_size", "heads", "head_dim"), every(ODD_SHAPES, 2, first=1), ids=str)
def test_odd_shapes(page_size: int, heads: tuple[int, int], head_dim: int) -> None:
    """Groups of 5 and 7, heads and pages of sizes that are no powers of two."""
    case = Case((3, 3), (40, 9), heads, head_dim=head_dim, page_size=page_size)
    case.check(case.extend())


def test_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one search step for the sequence of a tile and of a token, and sequences without tokens."""
    monkeypatch.setattr(triton_extend, "_SEQS", 4)
    query_lens = (1, 0, 17, 2, 5, 0, 0, 13, 4, 1)
    case = Case(query_lens, tuple(query_len + i % 3 for i, query_len in enumerate(query_lens)), (2, 1), page_size=4)
    case.check(case.extend(block_m=16, block_n=16))


def test_long_uniform_chunks_are_ragged_ones() -> None:
    case = Case((70, 70), (70, 90), (2, 1))
    plan = PagedPlan.uniform(case.table, case.lens, 70, case.page_size)
    assert plan.starts is not None and plan.starts.tolist() == [0, 70, 140]
    case.check(extend_attention(case.q, case.kv, plan))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "window"), [((5,), (200,), 100), ((9, 1, 0, 12), (9, 150, 0, 100), None)], ids=str
)
def test_short_chunks_behind_long_prefixes(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs share the keys of a tile, whose last one combines what they found; a second layer finds the same."""
    monkeypatch.setattr(triton_extend, "_MIN_SPLIT", 32)
    parts: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...] | int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.zeros(shape, dtype=dtype, device=device)
        if isinstance(shape, tuple) and shape[1:] == (32,):
            parts.append(made.fill_(float("nan")))
        return made

    monkeypatch.setattr(torch, "empty", empty)
    case = Case(query_lens, seq_lens, (4, 2))
    plan = PagedPlan.ragged(case.table, case.lens, case.starts, len(case.qkv), case.page_size)
    tiles = ExtendTiles.choose(case.q, case.kv)._replace(block_m=16, block_n=16, num_slots=20)
    outs = [extend_attention(case.q, case.kv, plan, window, tiles) for _ in range(2)]
    case.check(outs[0], window)
    assert torch.equal(*outs)
    (shares,) = plan._shares.values()
    assert max(word >> 40 for word in shares.firsts.tolist()) > 2
    num_keys = [0] * len(shares.firsts)  # of each tile
    for seq, (start, query_len) in enumerate(zip(case.starts.tolist(), query_lens, strict=False)):
        for number in range(-(-2 * query_len // 16)):
            last = min(8 * number + 7, query_len - 1)
            num_keys[2 * start // 16 + seq + number] = seq_lens[seq] - query_len + last + 1
    items = zip(shares.items.tolist(), shares.lens.tolist(), strict=True)
    assert all(length == num_keys[word & 0xFFFFF] for word, length in items if word >= 0)
    by_head = parts[0].view(len(shares.items), 2, 16, 32).isfinite().all(-1).sum((0, 2)).tolist()
    assert by_head[0] == by_head[1] > 0  # no head writes where another does


@pytest.mark.parametrize("window", [None, 5])
def test_chunks_that_see_nothing(window: int | None) -> None:
    """Empty sequences change nothing; tokens of a sequence of length 0 become 0, whatever pages hold."""
    case = Case((7, 2), (30, 9), page_size=4)
    expected = case.extend(window, block_m=16, block_n=16)
    num_padding = 39
    case.table = torch.cat([case.table, torch.zeros(3, case.table.shape[1], dtype=torch.int64, device=DEVICE)])
    case.lens = torch.cat([case.lens, torch.zeros(3, dtype=torch.int64, device=DEVICE)])
    case.starts = torch.tensor([0, 7, 9, 9, 9, 9 + num_padding], dtype=torch.int32, device=DEVICE)
    case.qkv = torch.cat([case.qkv, torch.ones(num_padding, case.qkv.shape[1], device=DEVICE)])
    out = case.extend(window, block_m=16, block_n=16)
    assert torch.equal(out[:9], expected)
    assert (out[9:] == 0).all()
    assert (case.extend(window, case.sinks(), block_m=16, block_n=16)[9:] == 0).all()


def test_large_scores() -> None:
    """Softmax picks one key; its exponentials would overflow."""
    case = Case((1, 1), (50, 33), (2, 1))
    case.qkv *= 100
    case.kv *= 100
    case.check(case.extend(block_n=16))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize(
    ("is_shared", "half", "number"),
    every(
        [
            *((False, half, number) for half in (0, 1) for number in NOT_NUMBERS),
            (True, 0, float("nan")),
            (True, 1, float("inf")),
        ],
        2,
    ),
)
def test_a_number_that_is_none_spoils_only_rows_that_see_it(
    is_shared: bool, half: int, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of five new tokens of one sequence: the two before it do not see it, nor does the other sequence."""
    monkeypatch.setattr(triton_extend, "_MIN_SPLIT", 32 if is_shared else 512)
    case = Case((5, 5), (60, 40), (2, 1), page_size=10)
    sizes = {"num_slots": 20 if is_shared else 1, "block_m": 16, "block_n": 16}
    clean, slot = case.extend(**sizes), 57
    case.kv[case.table[0, slot // 10], half, :, slot % 10] = number
    sees = torch.tensor([False, False, True, True, True] + [False] * 5, device=DEVICE)
    assert_spoils_only(case.extend(**sizes), clean, sees, half, number)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_number_that_is_none_and_left_the_window_spoils_nothing(query_len: int) -> None:
    case = Case((query_len,) * 2, (90, 40), (2, 1), page_size=10)
    clean = case.extend(20, block_m=16, block_n=64)
    slot = 90 - query_len - 20  # one before the first that the first new token sees, in a tile with it
    case.kv[case.table[0, slot // 10], :, :, slot % 10] = float("nan")
    torch.testing.assert_close(case.extend(20, block_m=16, block_n=64), clean)


@IN_A_FILE
@WRAPS
def test_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    q, pool = make_queries(3), make_large_pool(tmp_path)
    expected = paged_attention_ref(q, small_pool(pool)[0], SMALL_TABLE, [3], [SEQ_LEN], None)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    out = extend_attention(q, pool[0], PagedPlan.ragged(TABLE, LENS, starts, 3, PAGE_SIZE))
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("page_size", "heads", "head_dim", "dtype", "window"),
    [
        (1, (3, 1), 10, torch.float32, None),
        (3, (2, 2), 72, torch.float32, 20),
        (16, (8, 2), 32, torch.float16, None),
        (64, (3, 1), 16, torch.float16, 5),
    ],
    ids=str,
)
def test_pages_in_fp8(
    page_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    """Slots that nobody has written have scales of NaN. The last tiles of keys end within a page."""
    case = Case((21, 1, 7, 30), (21, 9, 60, 54), heads, head_dim, page_size, dtype, in_fp8=True)
    case.check(case.extend(window, block_m=32, block_n=16), window)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("half", [0, 1])
def test_a_scale_that_is_no_number_spoils_only_rows_that_see_it(half: int) -> None:
    case = Case((5, 5), (60, 40), (2, 1), page_size=10, in_fp8=True)
    clean = case.extend(block_m=16, block_n=16)
    scales_of(case.kv)[case.table[0, 5], half, :, 7] = float("nan")
    sees = torch.tensor([False, False, True, True, True] + [False] * 5, device=DEVICE)
    assert_spoils_only(case.extend(block_m=16, block_n=16), clean, sees, half, float("nan"))
