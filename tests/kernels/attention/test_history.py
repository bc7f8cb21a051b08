"""Attention over a history is the specification of attention, whatever its length, and needs only shapes known before.

The library's attention for CPUs runs the same calls as cuDNN on a GPU: blocks, what is left, padding, and joins.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized import fp8_numbers
from thinned import thinned
from triton_device import DEVICE, ULP, random

pytest.importorskip("triton")

from attention_case import TOLERANCE, Case

from baton.engine.config import EngineConfig, KvDtype
from baton.engine.engine import Engine
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow
from baton.kernels.attention import history, prompt_attention
from baton.kernels.attention.attention import paged_attention_ref
from baton.kernels.attention.history import (
    Part,
    Shape,
    attend_part,
    blocks,
    gather_keys,
    gather_keys_ref,
    history_attention,
    join_parts,
    join_parts_ref,
    shapes,
    takes,
)
from baton.kernels.operations import preferring

IS_GPU = DEVICE == "cuda"
DTYPES = [torch.bfloat16, torch.float16] if IS_GPU else [torch.float32, torch.bfloat16]
HEAD_DIMS = [64, 128] if IS_GPU else [16, 20, 64, 128, 256]
BEFORE = (1, 7, 8, 9, 31, 32, 33, 70, 101)
KV_DTYPES: tuple[KvDtype, ...] = ("auto", "fp8")
USUAL = {"UNIT": history.UNIT, "LEAST": history.LEAST, "BLOCKS": history.BLOCKS}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few keys, so that short histories have several."""
    monkeypatch.setattr(history, "UNIT", 4)
    monkeypatch.setattr(history, "LEAST", 8)
    monkeypatch.setattr(history, "BLOCKS", (32, 16, 8))


def part_ref(q: torch.Tensor, kv: torch.Tensor, *, is_causal: bool) -> Part:
    """Do the work of `attend_part` in float32."""
    k, v = kv.float().repeat_interleave(q.shape[1] // kv.shape[1], 1)
    scores = torch.einsum("thd,hjd->htj", q.float(), k) * q.shape[2] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("htj,hjd->thd", scores.softmax(-1), v)
    return Part(out.to(q.dtype).contiguous(), scores.logsumexp(-1))


def check(case: Case) -> None:
    """Compare the second sequence of a case, whose pool is NaN but for the slots of sequences."""
    num_first, num_tokens = case.query_lens
    num_before = case.seq_lens[1] - num_tokens
    out = history_attention(case.q[num_first:], case.kv, case.table, 1, num_before)
    kv = fp8_numbers(case.kv).to(case.dtype) if case.kv.dtype == torch.float8_e4m3fn else case.kv
    expected = paged_attention_ref(
        case.q, kv.nan_to_num(), case.table, case.query_lens, case.seq_lens, None
    )  # [all tokens, num_heads, head_dim]
    assert out.is_contiguous() and out.dtype == case.dtype
    torch.testing.assert_close(out, expected[num_first:], atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


@pytest.mark.usefixtures("each_backend")
@pytest.mark.each_value
@pytest.mark.parametrize("num_before", BEFORE)
@pytest.mark.parametrize("num_tokens", [1, 11, 24])
def test_any_length_is_the_specification(num_tokens: int, num_before: int) -> None:
    """Histories shorter and longer than a block, multiples of a page, of a block and of neither."""
    check(Case((5, num_tokens), (9, num_before + num_tokens), (4, 2), head_dim=64, dtype=DTYPES[0]))


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize(
    ("heads", "page_size"),
    thinned(
        itertools.product([(3, 3), (8, 2), (5, 1), (14, 2)], [1, 3, 10, 16, 48, 64]),
        lambda i, *_: i in (0, 4, 7, 11, 14, 21),  # each of both
    ),
    ids=str,
)
def test_pages_and_groups(page_size: int, heads: tuple[int, int]) -> None:
    check(Case((2, 13), (50, 13 + 75), heads, head_dim=64, page_size=page_size, dtype=DTYPES[0]))


@pytest.mark.usefixtures("each_backend")
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    check(Case((2, 13), (20, 13 + 75), (4, 2), head_dim=head_dim, dtype=dtype))


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("page_size", [3, 16])
def test_pages_in_fp8(page_size: int) -> None:
    """Keys are gathered in the dtype of the queries."""
    case = Case((2, 13), (20, 13 + 75), (4, 2), head_dim=64, page_size=page_size, dtype=DTYPES[0], in_fp8=True)
    check(case)
    keys = gather_keys(case.kv, case.table, 1, 5, 88, 90, case.dtype)
    assert keys.dtype == case.dtype and (keys[:, :, 83:] == 0).all()
    assert torch.equal(keys, gather_keys_ref(case.kv, case.table, 1, 5, 88, 90, case.dtype))
    slots = torch.arange(5, 88, device=DEVICE)
    wanted = fp8_numbers(case.kv)[case.table[1, slots // page_size], :, :, slots % page_size]
    assert torch.equal(keys[:, :, :83], wanted.permute(1, 2, 0, 3).to(case.dtype))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_of_the_library_returns_the_natural_log_sum_exp(dtype: torch.dtype, is_causal: bool) -> None:
    q, kv = random(64, 4, 64, dtype=dtype), random(2, 2, 64, 64, dtype=dtype, seed=1)
    found, expected = attend_part(q, kv, is_causal=is_causal), part_ref(q, kv, is_causal=is_causal)
    assert found.lse.dtype == torch.float32 and found.out.is_contiguous()
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.out, expected.out, atol=8 * ULP[dtype], rtol=8 * ULP[dtype])


@pytest.mark.usefixtures("each_backend")
def test_gathered_keys_are_those_of_the_slots_and_zeros() -> None:
    case = Case((5, 1), (40, 90), (2, 2), head_dim=20, page_size=10)
    for start, stop, num_keys in ((0, 90, 96), (37, 38, 1), (50, 90, 70), (0, 64, 64)):
        keys = gather_keys(case.kv, case.table, 1, start, stop, num_keys, case.dtype)
        assert keys.shape == (2, 2, num_keys, 20) and keys.is_contiguous()
        for slot in range(start, stop):
            wanted = case.kv[case.table[1, slot // 10], :, :, slot % 10]
            assert torch.equal(keys[:, :, slot - start], wanted)
        assert (keys[:, :, stop - start :] == 0).all()
        assert torch.equal(keys, gather_keys_ref(case.kv, case.table, 1, start, stop, num_keys, case.dtype))


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("distance", [0.0, 3.0, 200.0, -200.0])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.bfloat16)])
def test_a_join_weighs_parts_by_their_sums(dtypes: tuple[torch.dtype, ...], distance: float) -> None:
    """Exponentials of the log-sum-exps themselves would overflow. Rows may be strided in the log-sum-exp."""
    num_rows, num_heads = 7, 5
    first = Part(random(num_rows, num_heads, 20, dtype=dtypes[0]), random(num_heads, num_rows, seed=1) + 300)
    lse = random(num_rows, num_heads, seed=2).t() + 300 + distance
    second = Part(random(num_rows, num_heads, 20, dtype=dtypes[1], seed=3), lse)
    weights = torch.stack((first.lse, second.lse)).double().softmax(0).transpose(1, 2).unsqueeze(3)
    expected = (weights * torch.stack((first.out.double(), second.out.double()))).sum(0)
    out = torch.empty_like(first.out, dtype=dtypes[2])
    joined = join_parts(out, first, second)
    tolerance = 4 * ULP[dtypes[2]]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(joined, torch.logaddexp(first.lse, second.lse))
    before = first.out.clone()
    assert torch.equal(join_parts(first.out, first, second), joined), "in place"
    again = torch.empty_like(before)
    join_parts_ref(again, Part(before, first.lse), second)
    torch.testing.assert_close(first.out, again, atol=4 * ULP[dtypes[0]], rtol=4 * ULP[dtypes[0]])


@pytest.mark.usefixtures("each_backend")
def test_a_value_that_is_no_number_spoils_rows_that_see_it() -> None:
    case = Case((5, 11), (9, 11 + 50), (2, 1), head_dim=64, dtype=DTYPES[0])
    case.kv[case.table[1, 20 // 16], 1, :, 20 % 16] = float("nan")
    assert history_attention(case.q[5:], case.kv, case.table, 1, 50).isnan().any(-1).all()


def test_blocks_are_the_largest_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BLOCKS", USUAL["BLOCKS"])
    assert blocks(0) == blocks(4095) == []
    assert blocks(114_688 + 100) == [32_768] * 3 + [16_384]
    assert blocks(28_672) == [16_384, 8_192, 4_096]
    for num_before in range(1, 140_000, 997):
        assert 0 <= num_before - sum(blocks(num_before)) < 4096


def test_shapes_are_few_and_all_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of every chunk of up to 24 tokens has a known shape, and every known shape is needed."""
    met = set[Shape]()

    def attend(q: torch.Tensor, kv: torch.Tensor, *, is_causal: bool) -> Part:
        met.add(Shape(len(q), kv.shape[2], is_causal))
        return Part(torch.zeros_like(q), torch.zeros(q.shape[1], len(q)))

    monkeypatch.setattr(history, "attend_part", attend)
    kv_layer, table = torch.zeros(2, 2, 1, 256, 8), torch.ones(1, 1, dtype=torch.int64)
    for num_tokens in range(1, 25):
        for num_before in range(80):
            if takes(num_tokens, num_before):
                history_attention(torch.zeros(num_tokens, 1, 8), kv_layer, table, 0, num_before)
    assert met == set(shapes(24))
    assert shapes(7) == [] and takes(8, 1) and not takes(7, 100) and not takes(8, 0)


def test_a_usual_chunk_needs_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sizes that a node uses."""
    for name, value in USUAL.items():
        monkeypatch.setattr(history, name, value)
    known = shapes(8192)
    assert len(known) == 29 and max(each.num_rows for each in known) == 12_288
    assert {each.num_rows for each in known if not each.is_causal} == {4096, 5120, 6144, 7168, 8192}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", ["base 2", "refused"])
def test_a_library_that_does_not_return_the_natural_log_sum_exp_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompt_attention, "serves", lambda *_: True)

    def attend(q: torch.Tensor, kv: torch.Tensor, *, is_causal: bool) -> Part:
        if fault == "refused":
            raise RuntimeError("not supported")
        part = part_ref(q, kv, is_causal=is_causal)
        return Part(part.out, part.lse * 1.4427)

    serves = history.serves.__wrapped__
    assert serves(torch.device(DEVICE), DTYPES[0], 64)
    monkeypatch.setattr(history, "attend_part", attend)
    with caplog.at_level(logging.WARNING):
        assert not serves(torch.device(DEVICE), DTYPES[0], 64)
    assert "log-sum-exp" in caplog.text or "not supported" in caplog.text


def test_a_cpu_keeps_its_own_way() -> None:
    assert not history.serves(torch.device("cpu"), torch.float32, 64)


def make_engine(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    kv_dtype: KvDtype,
    *,
    serves: bool,
    chunk_tokens: int | None = None,
) -> Engine:
    monkeypatch.setattr(history, "serves", lambda *_: serves)
    monkeypatch.setattr(prompt_attention, "serves", lambda *_: serves)
    model = checkpoint("qwen3", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    sizes = {"page_size": 4, "num_pages": 60, "chunk_tokens": chunk_tokens}
    return Engine(EngineConfig(model=str(model), device=DEVICE, dtype="float32", kv_dtype=kv_dtype, **sizes))


@pytest.mark.parametrize("kv_dtype", thinned(KV_DTYPES, lambda i, _: i == 1 or IS_GPU))
def test_a_forward_is_the_same_with_it_and_without(
    kv_dtype: KvDtype, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of three prompts side by side: a long one, a short one, and one that begins."""
    lens, steps = (50, 33, 9), ((0, 5, 5), (30, 3, 2), (20, 9, 2), (0, 16, 0))
    wanted = {Shape(28, 28, True), Shape(20, 16, False), Shape(20, 8, False)}  # 20 behind 30
    wanted |= {Shape(12, 12, True), Shape(12, 8, False)}  # 9 behind 8
    wanted |= {Shape(20, 20, True), Shape(16, 16, False)}  # 16 behind 17
    outputs: list[torch.Tensor] = []
    for serves in (False, True):
        calls = list[Shape]()

        def attend(q: torch.Tensor, kv: torch.Tensor, *, is_causal: bool, told: list[Shape] = calls) -> Part:
            told.append(Shape(len(q), kv.shape[2], is_causal))
            return part_ref(q, kv, is_causal=is_causal)

        monkeypatch.setattr(history, "attend_part", attend)
        engine = make_engine(checkpoint, monkeypatch, kv_dtype, serves=serves)
        calls.clear()  # on a GPU the engine has tried every shape
        pages = [engine.pool.allocate(-(-length // 4), Owner.REQUEST) for length in lens]
        ids = [[(7 * seq + 3 * i) % 500 for i in range(length)] for seq, length in enumerate(lens)]
        done, logits = [0, 0, 0], list[torch.Tensor]()
        with preferring("triton"):
            for step in steps:
                rows = [
                    BatchRow(ids[seq][done[seq] : done[seq] + num_new], done[seq], pages[seq], num_new)
                    for seq, num_new in enumerate(step)
                    if num_new
                ]
                logits.append(engine.forward(rows))
                done = [before + num_new for before, num_new in zip(done, step, strict=True)]
        assert done == list(lens)
        outputs.append(torch.cat(logits))
        assert set(calls) == (wanted if serves else set()), calls
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", thinned(KV_DTYPES, lambda i, _: i == 0 or IS_GPU))
def test_a_node_runs_every_shape_before_it_serves(
    kv_dtype: KvDtype, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes are planned while the weights load. The longest history that matters for memory runs later, although the
    pool holds no more than a chunk."""
    monkeypatch.setattr(prompt_attention, "shapes", lambda _: [])
    met = list[Shape]()

    def attend(q: torch.Tensor, kv: torch.Tensor, *, is_causal: bool) -> Part:
        met.append(Shape(len(q), kv.shape[2], is_causal))
        return part_ref(q, kv, is_causal=is_causal)

    monkeypatch.setattr(history, "attend_part", attend)
    with preferring("triton"):
        engine = make_engine(checkpoint, monkeypatch, kv_dtype, serves=True, chunk_tokens=20)
        assert met == shapes(20)
        met.clear()
        engine.resize(7)
        engine.warm_up(20)
    assert engine.pool.num_free == engine.pool.num_usable
    assert met == [Shape(28, 28, True), Shape(20, 32, False), Shape(20, 32, False)]
