"""Attention that numba compiles, against the specifications of attention, norm and rotation."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from large_pool import (
    HEAD_DIM,
    IN_A_FILE,
    LENS,
    NUM_HEADS,
    SEQ_LEN,
    SMALL_TABLE,
    TABLE,
    make_large_pool,
    make_queries,
    make_rotation,
    small_pool,
)
from thinned import halved

from baton.kernels import numba_kernels, operations
from baton.kernels.attention.attention import Tree, paged_attention_ref
from baton.kernels.attention.numba_attention import attend, attend_stored
from baton.kernels.attention.paged_rows import PagedRows, attend_ref, attend_stored_ref
from baton.kernels.products.norm import rms_norm_ref
from baton.kernels.products.rotary import rotary_ref

SPARE_PAGES = 5  # owned by nobody, NaN
NUM_LAYERS, LAYER = 2, 1
TOLERANCE = 1e-5
SHAPES = {  # query_lens, seq_lens
    "first token": ((1,), (1,)),
    "ragged decode": ((1, 1, 1, 1, 1), (3, 70, 33, 1, 32)),
    "verify": ((5, 5, 5), (9, 64, 5)),
    "mixture": ((1, 9, 2, 7, 3), (40, 9, 33, 23, 36)),
}
pytestmark = pytest.mark.skipif(not operations.is_installed("numba"), reason="needs numba")


class Case:
    """Random new tokens on a NaN pool, in which only the slots of earlier tokens hold numbers."""

    def __init__(
        self, query_lens, seq_lens, *, heads=(4, 2), head_dim=32, page_size=16, is_tree=False, with_norms=False
    ):
        self.query_lens, self.seq_lens, (self.num_heads, self.num_kv_heads) = query_lens, seq_lens, heads
        self.page_size, self.head_dim = page_size, head_dim
        generator = torch.Generator().manual_seed(0)
        counts = [-(-seq_len // page_size) for seq_len in seq_lens]
        free = (torch.randperm(sum(counts) + SPARE_PAGES - 1, generator=generator) + 1).tolist()
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        shape = (NUM_LAYERS, sum(counts) + SPARE_PAGES, 2, self.num_kv_heads, page_size, head_dim)
        self.kv = torch.full(shape, float("nan"))
        for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            self.table[seq, : counts[seq]] = torch.tensor([free.pop() for _ in range(counts[seq])])
            for j in range(seq_len - query_len):
                page, slot = self.table[seq, j // page_size], j % page_size
                values = torch.randn(2, self.num_kv_heads, head_dim, generator=generator)
                self.kv[LAYER, page, :, :, slot] = values
        self.qkv = torch.randn(sum(query_lens), (heads[0] + 2 * heads[1]) * head_dim, generator=generator)
        angles = torch.randn(sum(query_lens), 1, head_dim // 2, generator=generator)
        self.cos = torch.cat((angles.cos(), angles.cos()), -1)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1)
        self.norms = tuple(torch.randn(2, head_dim, generator=generator).unbind(0)) if with_norms else None
        self.positions, self.tree = self._tree(generator) if is_tree else (self._slots(), None)

    def _slots(self) -> torch.Tensor:
        spans = zip(self.query_lens, self.seq_lens, strict=True)
        return torch.cat([torch.arange(seq_len - query_len, seq_len) for query_len, seq_len in spans])

    def _tree(self, generator: torch.Generator) -> tuple[torch.Tensor, Tree]:
        """Each new token hangs on a random one of the tree: it sees its ancestors and itself; its position is its
        depth. The tree began up to three slots before the new tokens."""
        visible = torch.zeros(sum(self.query_lens), max(self.query_lens) + 3, dtype=torch.bool)
        positions, starts, row = [], [], 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            num_before = min(3, seq_len - query_len)
            for i in range(query_len):
                if i > 0:
                    parent = int(torch.randint(i, (1,), generator=generator))
                    visible[row + i] = visible[row + parent]
                elif num_before:
                    visible[row, int(torch.randint(num_before, (1,), generator=generator))] = True
                visible[row + i, num_before + i] = True
                positions.append(seq_len - query_len - num_before + int(visible[row + i].sum()) - 1)
            starts.append(seq_len - query_len - num_before)
            row += query_len
        return torch.tensor(positions), Tree(torch.tensor(starts), visible)

    def rows(self) -> PagedRows:
        rotary = (self.cos, self.sin)
        lens = torch.tensor(self.seq_lens)
        return PagedRows.build(rotary, self.table, self.query_lens, lens, self.positions, self.tree)

    def run(self, window: int | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        qkv = self.qkv.clone()
        return attend(qkv, self.kv.numpy(), LAYER, self.rows(), window, self.norms, 1e-6, sinks=sinks)

    def expected(self, window: int | None, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, layer's pages after it with zeros for NaN), by the specifications."""
        heads = self.qkv.view(len(self.qkv), -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.norms is not None:
            q, k = rms_norm_ref(q, self.norms[0], 1e-6), rms_norm_ref(k, self.norms[1], 1e-6)
        q, k = rotary_ref(q, self.cos, self.sin), rotary_ref(k, self.cos, self.sin)
        pages = self.kv[LAYER].nan_to_num()
        row = 0
        for seq, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            for slot in range(seq_len - query_len, seq_len):
                page = self.table[seq, slot // self.page_size]
                pages[page, 0, :, slot % self.page_size], pages[page, 1, :, slot % self.page_size] = k[row], v[row]
                row += 1
        out = paged_attention_ref(
            q, pages, self.table, self.query_lens, self.seq_lens, window, self.positions, self.tree, sinks=sinks
        )
        return out.flatten(1), pages


def test_a_pool_that_is_a_part_of_a_memory_is_read_by_the_same_machine_code() -> None:
    """The pool of a rank: its layers are contiguous, and other ranks' pages lie between them. So are a block table and
    a tree that are parts of wider ones. A compilation would take seconds, while requests wait."""
    case = Case(*SHAPES["mixture"])
    whole = case.run(None)
    q = torch.randn(len(case.seq_lens), case.num_heads, case.head_dim)
    stored = attend_stored(q, case.kv, LAYER, case.table, torch.tensor(case.seq_lens))
    counts = [len(each.signatures) for each in (numba_kernels.attend, numba_kernels.attend_stored)]
    memory = torch.zeros(NUM_LAYERS, 2 * case.kv.shape[1], *case.kv.shape[2:])
    part = memory[:, case.kv.shape[1] :].copy_(case.kv)
    case.kv = part
    case.table = torch.cat([case.table, case.table], 1)[:, : case.table.shape[1]]
    assert not case.table.is_contiguous()
    assert torch.equal(case.run(None), whole)
    assert torch.equal(attend_stored(q, part, LAYER, case.table, torch.tensor(case.seq_lens)), stored)
    case = Case(*SHAPES["verify"], is_tree=True)
    whole, visible = case.run(None), case.tree.visible
    case.tree = case.tree._replace(visible=torch.cat([visible, visible], 1)[:, : visible.shape[1]])
    assert torch.equal(case.run(None), whole)
    assert [len(each.signatures) for each in (numba_kernels.attend, numba_kernels.attend_stored)] == counts


@pytest.mark.parametrize(
    ("shape", "window", "is_tree", "page_size"),
    halved(SHAPES, [None, 1, 6, 20, 1000], [False, True], [1, 3, 4, 16, 32]),
)
def test_attention_equals_the_reference(shape: str, window: int | None, is_tree: bool, page_size: int) -> None:
    case = Case(*SHAPES[shape], page_size=page_size, is_tree=is_tree)
    expected, pages = case.expected(window)
    torch.testing.assert_close(case.run(window), expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(case.kv[LAYER].nan_to_num(), pages, atol=TOLERANCE, rtol=0)
    assert case.kv[1 - LAYER].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("is_tree", [False, True], ids=["causal", "tree"])
def test_sinks_equal_the_reference(shape: str, window: int | None, is_tree: bool) -> None:
    case = Case(*SHAPES[shape], is_tree=is_tree)
    sinks = torch.tensor([9.0, 0.5, 1e4, -1e4])
    expected, _ = case.expected(window, sinks)
    out = case.run(window, sinks)
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)
    assert (out[:, 64:96] == 0).all()
    assert torch.equal(out[:, 96:], Case(*SHAPES[shape], is_tree=is_tree).run(window)[:, 96:])


@pytest.mark.parametrize(
    ("head_dim", "heads", "with_norms"),
    halved([8, 20, 32, 64, 80, 128], [(3, 3), (4, 2), (6, 2), (7, 1)], [False, True]),
)
def test_attention_of_any_heads(head_dim: int, heads: tuple[int, int], with_norms: bool) -> None:
    case = Case(*SHAPES["mixture"], heads=heads, head_dim=head_dim, with_norms=with_norms)
    expected, pages = case.expected(None)
    torch.testing.assert_close(case.run(None), expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(case.kv[LAYER].nan_to_num(), pages, atol=TOLERANCE, rtol=0)


def test_large_scores_and_masked_extremes() -> None:
    """Scores of +-1e4, whose exponentials overflow or vanish: a softmax that picks one key."""
    case = Case((1, 1), (50, 33))
    case.qkv *= 100
    case.kv[LAYER] *= 100
    expected, _ = case.expected(None)
    torch.testing.assert_close(case.run(None), expected, atol=0, rtol=TOLERANCE)


def test_nan_of_a_broken_model_stays_nan() -> None:
    case = Case((1, 1), (20, 9))
    case.qkv[0, :32] = float("nan")  # a query head of the first sequence
    out = case.run(None)
    assert out[0, :32].isnan().all() and not out[0, 32:].isnan().any() and not out[1].isnan().any()


def test_a_page_that_begins_is_finite_throughout() -> None:
    """What `clear_fresh_pages` promises to the forwards that gather whole pages; other pages keep their bytes."""
    case = Case((1, 3, 1), (17, 18, 16))
    before = case.kv.clone()
    case.run(None)
    assert case.kv[LAYER, case.table[:2, 1]].isfinite().all()
    untouched = [page for page in range(case.kv.shape[1]) if page not in case.table]
    assert case.kv[:, untouched].isnan().all()
    assert torch.equal(case.kv[LAYER, case.table[2, 0], :, :, :15], before[LAYER, case.table[2, 0], :, :, :15])


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    case = Case(*SHAPES["mixture"], is_tree=True)
    together = case.run(7)
    starts = np.cumsum((0, *case.query_lens))
    for seq, (start, stop) in enumerate(itertools.pairwise(starts)):
        rows = PagedRows.build(
            (case.cos[start:stop], case.sin[start:stop]), case.table[seq : seq + 1], case.query_lens[seq : seq + 1],
            torch.tensor(case.seq_lens[seq : seq + 1]), case.positions[start:stop],
            Tree(case.tree.starts[seq : seq + 1], case.tree.visible[start:stop]),
        )  # fmt: skip
        alone = attend(case.qkv[start:stop].clone(), case.kv.numpy(), LAYER, rows, 7)
        assert torch.equal(alone, together[start:stop])


@pytest.mark.parametrize("num_threads", [2, 3, 16])
def test_threads_share_a_batch(num_threads: int) -> None:
    seq_lens = (2900, 20, 4000, 1, 333, 9000, 31)
    case = Case((1, 3, 1, 1, 2, 1, 3), seq_lens)
    alone = case.run(None)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        parts, ours = case.rows().parts, case.run(None)
    finally:
        torch.set_num_threads(before)
    assert 1 < len(parts) <= num_threads
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(7))
    assert torch.equal(ours, alone)


@pytest.mark.parametrize("shape", ["ragged decode", "first token"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_attention_to_stored_keys_equals_the_reference(shape: str, page_size: int) -> None:
    case = Case(*SHAPES[shape], page_size=page_size)
    q = case.qkv.view(len(case.qkv), -1, case.head_dim)[:, : case.num_heads]
    kv = case.kv.nan_to_num()
    ours = attend_stored(q, kv, LAYER, case.table, torch.tensor(case.seq_lens))
    expected = paged_attention_ref(q, kv[LAYER], case.table, case.query_lens, case.seq_lens, None)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("window", [None, 6])
def test_a_number_that_is_none_spoils_only_rows_that_see_it(window: int | None, half: int, number: float) -> None:
    """In a slot of the tree from before this forward, which some new tokens see, and in one that the window left."""
    case = Case((7, 7), (19, 40), page_size=10, is_tree=True)
    clean = case.run(window)
    slot, num_before = 40 - 7 - 1, 3  # the last node of earlier forwards
    case.kv[LAYER, case.table[1, slot // 10], half, :, slot % 10] = number
    case.kv[LAYER, case.table[1, 0], :, :, 0] = number if window else 0.5  # left the window
    sees = torch.cat([torch.zeros(7, dtype=torch.bool), case.tree.visible[7:, num_before - 1]])
    out = case.run(window)
    if window:
        torch.testing.assert_close(out[~sees], clean[~sees])
    else:
        assert out[~sees].isfinite().all()
    assert (~sees[7:]).any()
    assert (half == 0 and number == number) or not out[sees].isfinite().any()


def test_a_causal_row_does_not_see_what_follows() -> None:
    case = Case((5,), (25,), page_size=10)
    clean = case.run(None)
    case.qkv[2, -64:] = float("nan")  # the third new token's values
    out = case.run(None)
    assert torch.equal(out[:2], clean[:2]) and out[2:].isnan().any(1).all()


@pytest.mark.parametrize("page_size", [1, 3, 10, 48])
@pytest.mark.parametrize("heads", [(5, 1), (14, 2)], ids=["group 5", "group 7"])
@pytest.mark.parametrize("head_dim", [10, 72, 576])
def test_odd_shapes(page_size: int, heads: tuple[int, int], head_dim: int) -> None:
    """The backend and the specification beside it, which also stores."""
    case = Case(*SHAPES["verify"], heads=heads, head_dim=head_dim, page_size=page_size, with_norms=True)
    kv, kv_ref = case.kv.nan_to_num(), case.kv.nan_to_num()
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(2))
    ours = attend(case.qkv.clone(), kv.numpy(), LAYER, case.rows(), 20, case.norms, 1e-6, sinks=sinks)
    expected = attend_ref(case.qkv.clone(), kv_ref.numpy(), LAYER, case.rows(), 20, case.norms, 1e-6, sinks=sinks)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(kv, kv_ref, atol=TOLERANCE, rtol=TOLERANCE)
    q = torch.randn(3, heads[0], head_dim, generator=torch.Generator().manual_seed(1))
    stored = (q, kv, LAYER, case.table, torch.tensor(case.seq_lens))
    torch.testing.assert_close(attend_stored(*stored), attend_stored_ref(*stored), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("page_size", [3, 16])
def test_a_single_plane_whose_heads_are_rotated_in_part(shape: str, is_tree: bool, page_size: int) -> None:
    case = Case(*SHAPES[shape], heads=(5, 1), head_dim=56, page_size=page_size, is_tree=is_tree)
    case.cos, case.sin = case.cos[..., 10:26].contiguous(), case.sin[..., 10:26].contiguous()
    kv, qkv = case.kv[:, :, :1].nan_to_num(), case.qkv[:, : 6 * 56]
    kv_ref, arguments = kv.clone(), (LAYER, case.rows(), None, None, 0.0, 0.3)
    expected = attend_ref(qkv.clone(), kv_ref.numpy(), *arguments)
    torch.testing.assert_close(attend(qkv.clone(), kv.numpy(), *arguments), expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(kv, kv_ref, atol=TOLERANCE, rtol=TOLERANCE)


@IN_A_FILE
def test_stored_keys_of_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    q, pool = make_queries(1), make_large_pool(tmp_path)
    expected = attend_stored_ref(q, small_pool(pool), 0, SMALL_TABLE, LENS)
    torch.testing.assert_close(attend_stored(q, pool, 0, TABLE, LENS), expected, atol=2e-5, rtol=2e-5)


@IN_A_FILE
def test_new_keys_go_to_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    """They are stored where the specification stores them in a small pool."""
    pool = make_large_pool(tmp_path)
    qkv = torch.randn(3, (NUM_HEADS + 2) * HEAD_DIM, generator=torch.Generator().manual_seed(2))
    positions, expected = torch.arange(SEQ_LEN - 3, SEQ_LEN), small_pool(pool)
    rows, small_rows = (
        PagedRows.build(make_rotation(3), table, [3], LENS, positions) for table in (TABLE, SMALL_TABLE)
    )
    out = attend(qkv.clone(), pool.numpy(), 0, rows, None)
    torch.testing.assert_close(out, attend_ref(qkv, expected.numpy(), 0, small_rows, None), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(small_pool(pool), expected)
