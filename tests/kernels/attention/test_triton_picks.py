"""Index scores and picks by Triton against their specification, on a GPU if there is one, otherwise in the
interpreter."""

from __future__ import annotations

import pytest
import torch
from thinned import thinned
from triton_device import DEVICE

pytest.importorskip("triton")

from attention_case import Case

from baton.kernels.attention import triton_picks
from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.picks import PagedSight, PickedRows, Sight, index_scores_ref, pick
from baton.kernels.attention.triton_picks import paged_index_scores, paged_picks

HEAD_DIM = 24


def check(case: Case, num_heads: int, num_picks: int, *, ragged: bool = False, piece: int = 7) -> None:
    """Compare scores where a token may see a slot, and picks exactly, given the scores."""
    generator = torch.Generator().manual_seed(num_picks)
    keys = case.kv[:, :1, :1].contiguous()
    num_tokens = sum(case.query_lens)
    q = torch.randn(num_tokens, num_heads, HEAD_DIM, generator=generator).to(DEVICE, case.dtype)
    weights = torch.randn(num_tokens, num_heads, generator=generator).to(DEVICE)
    weights[::3] = 0.0  # all scores are equal
    if ragged:
        plan = PagedPlan.ragged(case.table, case.lens, case.starts, num_tokens, case.page_size)
    else:
        plan = PagedPlan.uniform(case.table, case.lens, case.query_lens[0], case.page_size, case.tree, case.positions)
    sight, seen = PagedSight.of(plan, num_tokens), Sight.of(case.table, case.query_lens, case.lens, case.tree)
    assert sight.seqs.tolist() == seen.seqs.tolist()
    expected = index_scores_ref(q, weights, keys.nan_to_num(), seen)
    num_slots = case.table.shape[1] * case.page_size
    num = min(num_picks, num_slots)
    out = PickedRows(
        torch.full((num_tokens, num), -7, dtype=torch.int64, device=DEVICE),
        torch.full((num_tokens,), -7, dtype=torch.int64, device=DEVICE),
    )
    for first in range(0, num_tokens, piece):
        tokens = range(first, min(first + piece, num_tokens))
        scores = paged_index_scores(q, weights, keys, plan, sight, tokens)
        for i, token in enumerate(tokens):
            end = int(sight.ends[token])
            torch.testing.assert_close(scores[i, :end], expected[token, :end], atol=2e-3, rtol=2e-3)
            scores[i, end:] = 99.0  # nobody may look there
        paged_picks(scores, plan, sight, tokens, case.page_size, num_picks, out)
        for i, token in enumerate(tokens):
            own = scores[i : i + 1].clone()
            own[:, int(sight.ends[token]) :] = float("-inf")
            picks = [slot for slot in pick(own, num_picks)[0].tolist() if slot >= 0]
            table = case.table[seen.seqs[token]].tolist()
            rows = [table[slot // case.page_size] * case.page_size + slot % case.page_size for slot in picks]
            assert out.counts[token] == len(rows)
            assert out.rows[token, : len(rows)].tolist() == rows


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "page_size", "num_picks"),
    [
        ((1, 1, 1), (1, 70, 33), 16, 8),  # a decode step
        ((4, 4), (4, 50), 3, 5),  # a chain of drafts
        ((1,), (40,), 1, 64),  # all are taken
        ((9, 1, 0, 20), (9, 30, 5, 47), 10, 6),  # prompts, a chunk behind others, a sequence without tokens
        ((37,), (37,), 48, 16),
    ],
    ids=str,
)
def test_scores_and_picks(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], page_size: int, num_picks: int, dtype: torch.dtype
) -> None:
    case = Case(query_lens, seq_lens, (3, 1), head_dim=HEAD_DIM, page_size=page_size, dtype=dtype)
    is_ragged = len(set(query_lens)) > 1
    check(case, 5, num_picks, ragged=is_ragged)
    if not is_ragged:
        check(case, 20, num_picks, ragged=True, piece=100)


def test_a_score_has_the_same_bits_in_a_round_and_in_a_prompt() -> None:
    """An index tie, or a score next to the cut, is decided alike."""
    num_new, head_dim, num_heads, page_size = 20, 128, 64, 16
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    keys = torch.randn(20, 1, 1, page_size, head_dim, generator=generator).to(DEVICE, dtype)
    q = torch.randn(num_new, num_heads, head_dim, generator=generator).to(DEVICE, dtype)
    weights = torch.randn(num_new, num_heads, generator=generator).to(DEVICE)
    table = torch.randperm(20, generator=generator)[None].to(DEVICE)
    end = torch.tensor([300], device=DEVICE)
    prompt = PagedPlan.uniform(table, end, num_new, page_size)
    expected = paged_index_scores(q, weights, keys, prompt, PagedSight.of(prompt, num_new), range(num_new))
    for num in (1, 3, 8):
        plan = PagedPlan.uniform(table, end, num, page_size)
        own = paged_index_scores(q[-num:], weights[-num:], keys, plan, PagedSight.of(plan, num), range(num))
        for token in range(-num, 0):
            assert torch.equal(own[token, : 301 + token], expected[token, : 301 + token])


@pytest.mark.parametrize("num_picks", [3, 20])
def test_trees(num_picks: int) -> None:
    case = Case((7, 7), (30, 12), (3, 1), head_dim=HEAD_DIM, page_size=4, tree_before=2)
    assert case.tree is not None
    check(case, 4, num_picks)


@pytest.mark.parametrize("num_picks", thinned([1, 60, 300, 700, 4000], lambda i, _: i in (2, 4) or DEVICE == "cuda"))
def test_choices_among_many_slots_and_many_equal_scores(num_picks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many equal scores are not like their samples, nor is one whose best slots all stand between those."""
    for name, size in {"_MOST": 128, "_LEAST_PART": 128}.items():
        monkeypatch.setattr(triton_picks, name, size)
    num_slots, page_size = 3072, 16
    lens = [num_slots, 3000, 2777, 2777, 3001, 40, 700]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-40, 40, (len(lens), num_slots), generator=generator).float() / 8
    scores[1] = torch.randn(num_slots, generator=generator) * 1e30
    scores[2, ::2], scores[2, 5] = float("-inf"), float("nan")
    scores[3] = 0.0
    scores[4, 2000:2400] += 100.0
    scores = scores.to(DEVICE)
    table = torch.randperm(1500)[: len(lens) * num_slots // page_size].view(len(lens), -1).to(DEVICE)
    plan = PagedPlan.uniform(table, torch.tensor(lens, device=DEVICE), 1, page_size)
    rows = torch.zeros(len(lens), min(num_picks, num_slots), dtype=torch.int64, device=DEVICE)
    out = PickedRows(rows, torch.zeros(len(lens), dtype=torch.int64, device=DEVICE))
    sight = PagedSight.of(plan, len(lens))
    paged_picks(scores, plan, sight, range(len(lens)), page_size, num_picks, out)
    for row, end in enumerate(lens):
        own = scores[row : row + 1].clone()
        own[:, end:] = float("-inf")
        picks = torch.tensor([slot for slot in pick(own, num_picks)[0].tolist() if slot >= 0], device=DEVICE)
        assert out.counts[row] == len(picks)
        assert torch.equal(out.rows[row, : len(picks)], table[row, picks // page_size] * page_size + picks % page_size)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_a_graph_holds_scores_and_picks() -> None:
    """Captured once; replayed for other lengths, pages and numbers, which it reads on the device."""
    num_seqs, query_len, num_slots, page_size, num_heads, num_picks = 3, 2, 4096, 16, 64, 700
    table = torch.zeros(num_seqs, num_slots // page_size, dtype=torch.int64, device=DEVICE)
    keys = torch.zeros(num_seqs * num_slots // page_size, 1, 1, page_size, 128, dtype=torch.bfloat16, device=DEVICE)
    q = torch.zeros(num_seqs * query_len, num_heads, 128, dtype=torch.bfloat16, device=DEVICE)
    weights = torch.zeros(num_seqs * query_len, num_heads, device=DEVICE)
    lens = torch.zeros(num_seqs, dtype=torch.int64, device=DEVICE)

    def fill(seed: int, seq_lens: list[int]) -> None:
        torch.manual_seed(seed)
        table.copy_(torch.randperm(len(keys), device=DEVICE).view(num_seqs, -1))
        lens.copy_(torch.tensor(seq_lens))
        for each in (keys, q, weights):
            each.normal_()

    def forward() -> tuple[torch.Tensor, PickedRows, PagedSight]:
        plan = PagedPlan.uniform(table, lens, query_len, page_size)
        sight, tokens = PagedSight.of(plan, len(q)), range(len(q))
        scores = paged_index_scores(q, weights, keys, plan, sight, tokens)
        rows = torch.empty(len(q), num_picks, dtype=torch.int64, device=DEVICE)
        out = PickedRows(rows, torch.empty(len(q), dtype=torch.int64, device=DEVICE))
        paged_picks(scores, plan, sight, tokens, page_size, num_picks, out)
        return scores, out, sight

    fill(0, [4096, 1000, 3])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores, out, sight = forward()
    for seed, seq_lens in enumerate(([17, 4096, 2500], [2, 700, 701], [4096, 4096, 4096])):
        fill(seed, seq_lens)
        graph.replay()
        torch.cuda.synchronize()
        expected = index_scores_ref(q, weights, keys, Sight.of(table, [query_len] * num_seqs, lens))
        for token, end in enumerate(sight.ends.tolist()):
            torch.testing.assert_close(scores[token, :end], expected[token, :end], atol=5e-2, rtol=2e-2)
            slots = pick(scores[token : token + 1, :end].contiguous(), num_picks)[0].long()
            rows = table[token // query_len, slots // page_size] * page_size + slots % page_size
            assert out.counts[token] == len(slots) and torch.equal(out.rows[token, : len(slots)], rows)
