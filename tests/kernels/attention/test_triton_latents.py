"""Attention to latents by Triton against its specification, on a GPU if there is one, otherwise in the interpreter."""

from __future__ import annotations

import pytest
import torch
from thinned import is_whole, thinned
from triton_device import DEVICE

pytest.importorskip("triton")

from attention_case import TOLERANCE, Case

from baton.kernels.attention.attention import Tree, paged_attention_ref
from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.triton_latents import LatentTiles, latent_attention

RANK, ROTARY_DIM = 40, 16
WIDTH = RANK + ROTARY_DIM
SCALE = 0.11
DTYPES = [torch.float32, torch.float16]


def case_of(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], num_heads: int, **options: object) -> Case:
    """Return sequences over a pool of latents: the first plane of a pool of K and V."""
    case = Case(query_lens, seq_lens, (num_heads, 1), head_dim=WIDTH, **options)
    case.kv = case.kv[:, :1].contiguous()
    return case


def plan_of(case: Case) -> PagedPlan:
    if len(set(case.query_lens)) > 1:
        return ragged_plan_of(case)
    return PagedPlan.uniform(case.table, case.lens, case.query_lens[0], case.page_size, case.tree, case.positions)


def ragged_plan_of(case: Case) -> PagedPlan:
    return PagedPlan.ragged(case.table, case.lens, case.starts, len(case.qkv), case.page_size)


def attend(case: Case, plan: PagedPlan | None = None, **tiles: int) -> torch.Tensor:
    chosen = LatentTiles.choose(case.q, len(case.lens))._replace(**tiles)
    return latent_attention(case.q, case.kv, plan or plan_of(case), RANK, SCALE, chosen)


def check(case: Case, out: torch.Tensor) -> None:
    expected = paged_attention_ref(
        case.q, case.kv.nan_to_num(), case.table, case.query_lens, case.seq_lens, None, case.positions, case.tree, SCALE
    )
    assert out.dtype == case.dtype and out.is_contiguous()
    torch.testing.assert_close(out, expected[..., :RANK], atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_heads", "page_size"),
    [
        ((1, 1, 1), (1, 70, 33), 5, 16),  # a decode step
        ((1,), (40,), 16, 1),
        ((4, 4), (4, 50), 3, 3),  # a chain of drafts
        ((9, 1, 0, 20), (9, 30, 5, 47), 5, 10),  # prompts, a chunk behind others, a sequence without tokens
        ((37,), (37,), 6, 48),
    ],
    ids=str,
)
def test_sequences_of_any_lengths(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], num_heads: int, page_size: int, dtype: torch.dtype
) -> None:
    case = case_of(query_lens, seq_lens, num_heads, page_size=page_size, dtype=dtype)
    check(case, attend(case))
    check(case, attend(case, ragged_plan_of(case), keys_first=True))
    if is_whole():
        check(case, attend(case, block_n=64, keys_first=True))
        check(case, attend(case, ragged_plan_of(case)))


@pytest.mark.parametrize(
    ("tree_before", "query_len", "block_n"), thinned([(0, 7, 32), (3, 7, 16), (70, 30, 16)], lambda i, *_: i > 0)
)
def test_trees(tree_before: int, query_len: int, block_n: int) -> None:
    case = case_of((query_len,) * 2, (query_len + 2, 120), 3, page_size=4, tree_before=tree_before)
    for keys_first in (False, True):
        check(case, attend(case, block_n=block_n, keys_first=keys_first))


@pytest.mark.parametrize(
    ("query_lens", "num_slots", "is_ragged"),
    thinned(
        [
            (*case, is_ragged)
            for case in [((1, 1, 1), 12), ((5, 5, 5), 12), ((1, 1, 1), 1)]
            for is_ragged in (False, True)
        ],
        lambda i, *_: i in (0, 3, 5),
    ),
)
def test_programs_share_the_keys_of_a_long_sequence(
    query_lens: tuple[int, ...], num_slots: int, is_ragged: bool
) -> None:
    """The last program of a tile combines its parts, or a launch of its own does."""
    case = case_of(query_lens, (9, 900, 400), 4)
    chosen = LatentTiles.choose(case.q, 3)._replace(num_slots=num_slots)
    plan = ragged_plan_of(case) if is_ragged else plan_of(case)
    outs = [latent_attention(case.q, case.kv, plan, RANK, SCALE, chosen) for _ in range(2)]  # two layers
    check(case, outs[0])
    assert torch.equal(*outs)
    if num_slots == 1:
        assert not plan._shares  # tiles enough
        return
    (shares,) = plan._shares.values()
    assert max(word >> 40 for word in shares.firsts.tolist()) > 1
    assert not is_ragged or (shares.arrivals is not None and not shares.arrivals.any())


def test_another_launch_combines_the_splits_of_few_sequences() -> None:
    case = case_of((1,), (700,), 4)
    plan = plan_of(case)
    check(case, attend(case, plan, num_slots=12))
    (shares,) = plan._shares.values()
    assert shares.arrivals is None and shares.firsts.tolist()[0] >> 40 > 1


def test_padding_rows() -> None:
    """Sequences of padding alone, and of length 0, whose rows are 0."""
    case = case_of((2, 2), (30, 9), 5, page_size=4)
    expected = attend(case)
    table = torch.cat([case.table, torch.zeros(2, case.table.shape[1], dtype=torch.int64, device=DEVICE)])
    lens = torch.cat([case.lens, torch.tensor([2, 0], device=DEVICE)])
    q = torch.cat([case.q, torch.full((4, 5, WIDTH), float("nan"), device=DEVICE)])
    starts = torch.arange(0, 9, 2, dtype=torch.int32, device=DEVICE)
    for plan in (PagedPlan.ragged(table, lens, starts, 8, 4), PagedPlan.uniform(table, lens, 2, 4)):
        out = latent_attention(q, case.kv, plan, RANK, SCALE)
        torch.testing.assert_close(out[:4], expected)
        assert (out[6:] == 0).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [3, RANK + 5])
def test_a_number_that_is_none_spoils_only_rows_that_see_it(dim: int, number: float) -> None:
    """The third of five new tokens of one sequence: the two before it do not see it, nor does the other sequence."""
    case = case_of((5, 5), (150, 40), 3, page_size=10)
    clean, slot = attend(case), 147
    case.kv[case.table[0, slot // 10], :, :, slot % 10, dim] = number
    out = attend(case)
    sees = torch.tensor([False, False, True, True, True] + [False] * 5, device=DEVICE)
    torch.testing.assert_close(out[~sees], clean[~sees])
    assert number == number or not out[sees].isfinite().any()


def test_what_lay_in_memory_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of((2, 2, 2), (2, 500, 30), 3, spare_columns=40)

    def empty(shape: tuple[int, ...] | int, dtype: torch.dtype, **options: object) -> torch.Tensor:
        value = float("nan") if dtype.is_floating_point else 0x770077
        return torch.full(shape if isinstance(shape, tuple) else (shape,), value, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", empty)
    check(case, attend(case, num_slots=40))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("tree_before", [None, 3])
def test_a_graph_holds_a_forward(tree_before: int | None) -> None:
    """Captured once; replayed for other lengths and pages, which it reads on the device."""
    cases = [
        case_of((4, 4, 4), lens, 16, dtype=torch.bfloat16, tree_before=tree_before)
        for lens in ((50, 4, 1033), (4, 40, 61), (9, 2000, 17))
    ]
    columns = max(case.table.shape[1] for case in cases)
    pages = max(len(case.kv) for case in cases)
    table = torch.zeros(3, columns, dtype=torch.int64, device=DEVICE)
    q, kv, lens = cases[0].q.clone(), cases[0].kv.new_zeros(pages, *cases[0].kv.shape[1:]), cases[0].lens.clone()
    tree = None if cases[0].tree is None else Tree(*(each.clone() for each in cases[0].tree))
    positions = None if cases[0].positions is None else cases[0].positions.clone()

    def fill(case: Case) -> None:
        table.zero_()[:, : case.table.shape[1]] = case.table
        q.copy_(case.q)
        kv[: len(case.kv)] = case.kv
        lens.copy_(case.lens)
        if tree is not None and case.tree is not None:
            for static, each in zip(tree, case.tree, strict=True):
                static.copy_(each)

    def forward() -> torch.Tensor:
        plan = PagedPlan.uniform(table, lens, 4, 16, tree, positions)
        return latent_attention(q, kv, plan, RANK, SCALE)

    fill(cases[0])
    torch.cuda.synchronize()  # inputs were made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for case in (*cases, cases[0]):
        fill(case)
        graph.replay()
        check(case, out)
