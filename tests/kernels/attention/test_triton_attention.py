"""`decode_attention` by Triton against its specification, on a GPU if there is one, otherwise in the interpreter."""

from __future__ import annotations

import dataclasses
import itertools
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
from thinned import every, thinned
from triton_device import DEVICE

pytest.importorskip("triton")

from attention_case import HEADS_IN_DTYPES, NOT_NUMBERS, ODD_SHAPES, Case, assert_spoils_only

from baton.kernels.attention import triton_attention
from baton.kernels.attention.attention import Tree, paged_attention_ref
from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.triton_attention import DecodeTiles, decode_attention
from baton.kernels.attention.triton_extend import ExtendTiles
from baton.kernels.state.fp8_pages import scales_of


@pytest.mark.parametrize(
    ("page_size", "heads", "num_slots"),
    [(1, (2, 2), 3), (3, (3, 1), 1), (16, (8, 2), 3), (64, (8, 1), 1), (64, (3, 1), 3), (16, (1, 1), 1)],
    ids=str,
)
def test_one_new_token(page_size: int, heads: tuple[int, int], num_slots: int) -> None:
    case = Case((1, 1), (1, 70), heads, page_size=page_size)
    case.check(case.decode(num_slots=num_slots, block_n=16))


@pytest.mark.parametrize(
    ("window", "page_size", "query_len"), [(1, 16, 1), (1, 3, 5), (6, 3, 1), (20, 16, 5), (1000, 3, 5)]
)
def test_windows(window: int, page_size: int, query_len: int) -> None:
    case = Case((query_len,) * 2, (query_len, 75), (2, 1), page_size=page_size)
    case.check(case.decode(window, num_slots=2, block_n=16), window)


@pytest.mark.parametrize(
    ("query_len", "heads", "num_slots"), [(2, (3, 3), 4), (9, (6, 2), 1), (40, (3, 1), 3)], ids=str
)
def test_few_new_tokens(query_len: int, heads: tuple[int, int], num_slots: int) -> None:
    """Rows of early tokens see nothing of the last splits; several tiles of rows."""
    case = Case((query_len,) * 2, (query_len, query_len + 37), heads)
    case.check(case.decode(num_slots=num_slots, block_n=16))


@pytest.mark.parametrize(
    ("tree_before", "query_len", "window", "block_n"),
    [(0, 1, None, 16), (0, 7, 6, 64), (3, 7, None, 16), (3, 7, 6, 16), (70, 7, None, 64), (70, 30, 6, 16)],
)
def test_trees(tree_before: int, query_len: int, window: int | None, block_n: int) -> None:
    """Also of more than 64 columns, and with nodes of earlier forwards."""
    case = Case((query_len,) * 2, (query_len + 2, 120), (2, 1), page_size=4, tree_before=tree_before)
    case.check(case.decode(window, num_slots=2, block_n=block_n), window)


@pytest.mark.parametrize(
    ("tree_before", "query_len", "window", "dims"),
    [(None, 1, None, (24, 16)), (None, 5, 20, (32, 20)), (3, 7, None, (72, 10))],
)
def test_values_narrower_than_keys(
    tree_before: int | None, query_len: int, window: int | None, dims: tuple[int, int]
) -> None:
    case = Case((query_len,) * 2, (query_len, 140), (6, 2), dims[0], 4, tree_before=tree_before, value_dim=dims[1])
    sinks = case.sinks()
    out = case.decode(window, sinks, num_slots=3, block_n=16)
    case.check(out, window, sinks)
    assert not out[..., dims[1] :].any() and out[..., dims[1] - 1].any()


@pytest.mark.parametrize(
    ("sizes", "num_slots"),
    every(itertools.product([(None, 1, None), (None, 5, 20), (3, 7, None), (3, 7, 6)], [1, 3, 20]), 4),
    ids=str,
)
def test_sinks_count_once(sizes: tuple[int | None, int, int | None], num_slots: int) -> None:
    """Alone, by splits that the last program combines, and by splits that a launch of its own does."""
    tree_before, query_len, window = sizes
    case = Case((query_len,) * 3, (query_len, 300, 140), (6, 2), page_size=4, tree_before=tree_before)
    sinks = case.sinks()
    case.check(case.decode(window, sinks, num_slots=num_slots, block_n=16), window, sinks)


def test_a_sink_takes_all_or_nothing() -> None:
    case = Case((1, 1), (50, 33), (2, 1))
    sinks = torch.tensor([1e4, -1e4], device=DEVICE)
    out, without = case.decode(None, sinks, num_slots=2, block_n=16), case.decode(num_slots=2, block_n=16)
    assert (out[:, 0] == 0).all()
    assert torch.equal(out[:, 1], without[:, 1])


def test_padding_rows_have_no_sink() -> None:
    """A length of 0 gives 0, whatever lies in memory for its splits."""
    case = Case((2, 2, 2), (30, 300, 2), page_size=4)
    case.lens[2] = 0
    for num_slots in (1, 4, 40):
        assert (case.decode(None, case.sinks(), num_slots=num_slots, block_n=16)[4:] == 0).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_hidden_number_that_is_none_spoils_no_sink() -> None:
    case = Case((5, 5), (150, 40), (2, 1), page_size=10)
    sinks = case.sinks()
    clean, slot = case.decode(None, sinks, num_slots=9, block_n=16), 147
    case.kv[case.table[0, slot // 10], :, :, slot % 10] = float("nan")
    sees = torch.tensor([False, False, True, True, True] + [False] * 5, device=DEVICE)
    assert_spoils_only(case.decode(None, sinks, num_slots=9, block_n=16), clean, sees, 1, float("nan"))


@pytest.mark.parametrize(("head_dim", "dtype"), HEADS_IN_DTYPES, ids=str)
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    case = Case((3, 3), (40, 9), (2, 1), head_dim=head_dim, dtype=dtype)
    out = case.decode()
    assert out.dtype == dtype and out.is_contiguous()
    case.check(out)


def test_padding_rows() -> None:
    """Rows whose pages are all page 0: live rows are as without them; a length of 0 gives 0."""
    case = Case((2, 2), (30, 9), page_size=4)
    expected = case.decode(num_slots=2)
    table = torch.cat([case.table, torch.zeros(3, case.table.shape[1], dtype=torch.int64, device=DEVICE)])
    lens = torch.cat([case.lens, torch.tensor([2, 2, 0], device=DEVICE)])
    q = torch.cat([case.q, torch.full((6, 4, 32), float("nan"), device=DEVICE)])
    plan = PagedPlan.uniform(table, lens, 2, case.page_size, is_stored=True)
    for num_slots in (1, 2):
        tiles = DecodeTiles.choose(q, case.kv, len(table))._replace(num_slots=num_slots)
        out = decode_attention(q, case.kv, plan, None, tiles)
        torch.testing.assert_close(out[:4], expected)
        assert (out[8:] == 0).all()


@pytest.mark.parametrize(
    ("seq_lens", "garbage"),
    every([((2, 300, 30), float("nan")), ((1000,), float("nan")), ((130,), 1e30), ((2, 300, 30), 1e30)], 2),
    ids=str,
)
def test_what_lay_in_memory_does_not_matter(
    seq_lens: tuple[int, ...], garbage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is written that counts: here of more splits than there are tiles of keys."""
    case = Case((2,) * len(seq_lens), seq_lens, head_dim=80, spare_columns=40)  # room for more splits

    def empty(shape: tuple[int, ...] | int, dtype: torch.dtype, **options: object) -> torch.Tensor:
        value = garbage if dtype.is_floating_point else 0x770077
        return torch.full(shape if isinstance(shape, tuple) else (shape,), value, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", empty)
    for num_slots in (5, 40):
        case.check(case.decode(num_slots=num_slots, block_n=16))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_nan_of_a_broken_model_stays_nan() -> None:
    case = Case((1, 1), (400, 9))
    case.qkv[0, : case.head_dim] = float("nan")
    for num_slots in (1, 3, 9):
        out = case.decode(num_slots=num_slots, block_n=16)
        assert out[0, 0].isnan().all() and not out[0, 1:].isnan().any() and not out[1].isnan().any()


def test_large_scores() -> None:
    """Softmax picks one key; its exponentials would overflow."""
    case = Case((1, 1), (50, 33), (2, 1))
    case.qkv *= 100
    case.kv *= 100
    case.check(case.decode(num_slots=2, block_n=16))


@pytest.mark.each_value
@pytest.mark.parametrize("num_slots", [5, 7])
@pytest.mark.parametrize(("query_len", "heads", "window"), [(1, (4, 2), None), (9, (3, 1), None), (9, (3, 1), 20)])
def test_one_long_sequence_among_short_ones(
    num_slots: int, query_len: int, heads: tuple[int, int], window: int | None
) -> None:
    """With fewer slots than twice the sequences, the last program of a sequence combines its splits."""
    case = Case((query_len,) * 3, (query_len, 300, 140), heads)
    plan = PagedPlan.uniform(case.table, case.lens, query_len, case.page_size, is_stored=True)
    tiles = DecodeTiles.choose(case.q, case.kv, 3)._replace(num_slots=num_slots, block_n=16, block_m=16)
    outs = [decode_attention(case.q, case.kv, plan, window, tiles) for _ in range(2)]  # two layers
    case.check(outs[0], window)
    assert torch.equal(*outs)
    ((cut, shares),) = plan._shares.items()
    assert plan.shares(pytest.fail, *cut) is shares  # found once a forward
    assert [word >> 40 for word in shares.firsts.tolist()] == [1, 3, 2]
    assert (shares.arrivals is None) == (num_slots == 7)
    assert shares.arrivals is None or not shares.arrivals.any()


@pytest.mark.parametrize(("seq_len", "num_slots"), [(3, 40), (130, 40), (300, 2), (300, 40)])
def test_one_sequence(seq_len: int, num_slots: int) -> None:
    """It has as many splits as there are slots and its length is worth, and programs beyond do nothing."""
    case = Case((3,), (seq_len,), (4, 2))
    case.check(case.decode(num_slots=num_slots, block_n=16))


@pytest.mark.parametrize(("head_dim", "most"), [(128, (64, 128)), (256, (64, 128)), (512, (32, 64))])
def test_tiles_of_wide_heads_have_fewer_rows(head_dim: int, most: tuple[int, int]) -> None:
    """The sums of a tile of 512 numbers would spill: 64 rows of a decode step by 6 kB, as ptxas counts."""
    q = torch.empty(8, 32, head_dim, device=DEVICE, dtype=torch.bfloat16)
    kv = torch.empty(1, 2, 4, 16, head_dim, device=DEVICE, dtype=torch.bfloat16)
    assert (DecodeTiles.choose(q, kv, 1).block_m, ExtendTiles.choose(q, kv).block_m) == most


@pytest.mark.parametrize(("head_dim", "num_per_sm"), [(32, 6), (128, 3)])
def test_choice_of_slots(head_dim: int, num_per_sm: int) -> None:
    """By shapes alone: as many programs as run at once."""
    sms = triton_attention.num_sms(torch.device(DEVICE))
    kv = torch.empty(1, 2, 2, 16, head_dim, device=DEVICE, dtype=torch.float16)
    for num_seqs in (1, 2, 5, 10_000):
        q = torch.empty(num_seqs, 2, head_dim, device=DEVICE, dtype=torch.float16)
        tiles = DecodeTiles.choose(q, kv, num_seqs)
        assert tiles.num_slots == num_per_sm * sms // 2
        num_shares = num_per_sm * sms // (num_seqs * 2)
        assert tiles.num_stages == (2 if head_dim == 128 and (num_shares == 0 or 3 <= num_shares < 16) else 3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("tree_before", [None, 3])
def test_a_graph_holds_a_forward(tree_before: int | None) -> None:
    """Captured once; replayed for other lengths and pages, which it reads on the device."""
    case = Case((4, 4, 4), (50, 4, 33), head_dim=64, dtype=torch.bfloat16, tree_before=tree_before)
    other = Case((4, 4, 4), (4, 40, 61), head_dim=64, dtype=torch.bfloat16, tree_before=tree_before)
    table = torch.zeros(3, 8, dtype=torch.int64, device=DEVICE)
    q, kv, lens = case.q.clone(), case.kv.new_zeros(64, *case.kv.shape[1:]), case.lens.clone()
    positions = None if case.positions is None else case.positions.clone()
    tree = None if case.tree is None else Tree(*(each.clone() for each in case.tree))

    def fill(from_case: Case) -> None:
        table.zero_()[:, : from_case.table.shape[1]] = from_case.table
        q.copy_(from_case.q)
        kv[: len(from_case.kv)] = from_case.kv
        lens.copy_(from_case.lens)
        if tree is not None and positions is not None and from_case.tree is not None:
            positions.copy_(from_case.positions)
            for static, each in zip(tree, from_case.tree, strict=True):
                static.copy_(each)

    def forward() -> torch.Tensor:
        return decode_attention(q, kv, PagedPlan.uniform(table, lens, 4, 16, tree, positions), 40)

    fill(case)
    torch.cuda.synchronize()  # inputs were made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for each in (case, other, case):
        fill(each)
        graph.replay()
        each.check(out, 40)


def test_plans_hold_tensors_and_shapes_only() -> None:
    case = Case((2, 2), (5, 9), tree_before=0)
    plan = PagedPlan.uniform(case.table, case.lens, 2, case.page_size, case.tree, case.positions)
    kinds = {type(getattr(plan, field.name)) for field in dataclasses.fields(plan) if field.init}
    assert kinds <= {torch.Tensor, int, type(None)}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize(
    ("num_slots", "half", "number"),  # 1: programs have whole sequences; 3: they share; 9: all are split
    every(
        [
            *((1, half, number) for half in (0, 1) for number in NOT_NUMBERS),
            *((3, half, float("nan")) for half in (0, 1)),
            *((9, half, -float("inf")) for half in (1, 0)),
        ],
        2,
    ),
)
def test_a_number_that_is_none_spoils_only_rows_that_see_it(num_slots: int, half: int, number: float) -> None:
    """The third of five new tokens of one sequence: the two before it do not see it, nor does the other sequence."""
    case = Case((5, 5), (150, 40), (2, 1), page_size=10)
    clean, slot = case.decode(num_slots=num_slots, block_n=16), 147
    case.kv[case.table[0, slot // 10], half, :, slot % 10] = number
    sees = torch.tensor([False, False, True, True, True] + [False] * 5, device=DEVICE)
    assert_spoils_only(case.decode(num_slots=num_slots, block_n=16), clean, sees, half, number)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.each_value
@pytest.mark.parametrize("number", NOT_NUMBERS)
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_a_number_that_is_none_spoils_only_its_branch_of_a_tree(half: int, number: float) -> None:
    case = Case((7, 7), (9, 120), (2, 1), page_size=3, tree_before=2)
    assert case.tree is not None
    clean, node, num_before = case.decode(num_slots=2, block_n=16), 2, 2
    slot = 120 - 7 + node
    case.kv[case.table[1, slot // 3], half, :, slot % 3] = number
    sees = torch.cat([torch.zeros(7, dtype=torch.bool), case.tree.visible[7:, num_before + node].cpu()]).to(DEVICE)
    assert (~sees[7:]).any()
    assert_spoils_only(case.decode(num_slots=2, block_n=16), clean, sees, half, number)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_number_that_is_none_and_left_the_window_spoils_nothing(query_len: int) -> None:
    case = Case((query_len,) * 2, (90, 40), (2, 1), page_size=10)
    clean = case.decode(20, block_n=64)
    slot = 90 - query_len - 20  # one before the first that the first new token sees, in a tile with it
    case.kv[case.table[0, slot // 10], :, :, slot % 10] = float("nan")
    torch.testing.assert_close(case.decode(20, block_n=64), clean)


@pytest.mark.parametrize(("page_size", "heads", "head_dim"), every(ODD_SHAPES, 2), ids=str)
def test_odd_shapes(page_size: int, heads: tuple[int, int], head_dim: int) -> None:
    """Groups of 5 and 7, heads and pages of sizes that are no powers of two."""
    case = Case((3, 3), (40, 9), heads, head_dim=head_dim, page_size=page_size)
    case.check(case.decode())


@pytest.mark.parametrize("num_slots", thinned([40, 128], lambda i, _: i == 1))
def test_more_splits_than_a_warp_combines(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One KV head on a device of many processors."""
    monkeypatch.setattr(triton_attention, "num_sms", lambda _: 132)
    case = Case((1,), (64 * 130,), (2, 1), page_size=48)
    case.check(case.decode(num_slots=num_slots))


@IN_A_FILE
@WRAPS
def test_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    q, pool = make_queries(3), make_large_pool(tmp_path)
    expected = paged_attention_ref(q, small_pool(pool)[0], SMALL_TABLE, [3], [SEQ_LEN], None)
    out = decode_attention(q, pool[0], PagedPlan.uniform(TABLE, LENS, 3, PAGE_SIZE, is_stored=True))
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("page_size", "heads", "head_dim", "dtype", "tree_before", "window"),
    [
        (1, (3, 1), 10, torch.float32, None, None),
        (3, (2, 2), 72, torch.float32, None, 20),
        (16, (8, 2), 32, torch.float16, 3, 6),
        (64, (3, 1), 16, torch.float16, 70, None),
        (16, (4, 2), 128, torch.float32, 3, None),  # in pairs, from here on
        (10, (12, 1), 20, torch.float32, None, 20),  # more rows than registers take
    ],
    ids=str,
)
def test_pages_in_fp8(
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    tree_before: int | None,
    window: int | None,
) -> None:
    """Slots that nobody has written have scales of NaN."""
    case = Case((7, 7), (9, 120), heads, head_dim, page_size, dtype, tree_before, in_fp8=True)
    for num_slots in (1, 3):
        case.check(case.decode(window, num_slots=num_slots, block_n=16), window)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("half", [0, 1])
def test_a_scale_that_is_no_number_spoils_only_rows_that_see_it(half: int) -> None:
    for block_m in (16, 64):
        case = Case((5, 5), (60, 40), (2, 1), page_size=10, in_fp8=True)
        clean = case.decode(num_slots=2, block_n=16, block_m=block_m)
        scales_of(case.kv)[case.table[0, 5], half, :, 7] = float("nan")
        sees = torch.tensor([False, False, True, True, True] + [False] * 5, device=DEVICE)
        assert_spoils_only(case.decode(num_slots=2, block_n=16, block_m=block_m), clean, sees, half, float("nan"))
