"""The Triton kernels of attention against its specification, on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from triton_device import DEVICE, IS_INTERPRETED

pytest.importorskip("triton")

from baton.kernels import triton_attention, triton_extend
from baton.kernels.attention import Tree, paged_attention_ref
from baton.kernels.norm import rms_norm_ref
from baton.kernels.rotary import rotary_ref
from baton.kernels.triton_attention import DecodeTiles, Plan, decode_attention
from baton.kernels.triton_extend import ExtendTiles, extend_attention
from baton.kernels.triton_store import norm_rotate_store, token_rows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SPARE_PAGES = 3  # owned by nobody, NaN
EPS = 1e-6


class Case:
    """Random queries over a pool that is NaN but for the slots that sequences have filled; columns without a page name
    page 0, which is NaN too unless a sequence (padding) has nothing else."""

    def __init__(
        self, query_lens, seq_lens, heads=(4, 2), head_dim=32, page_size=16, dtype=torch.float32, tree_before=None,
        spare_columns=1,
    ):  # fmt: skip
        self.query_lens, self.seq_lens, (self.num_heads, self.num_kv_heads) = query_lens, seq_lens, heads
        self.page_size, self.head_dim, self.dtype = page_size, head_dim, dtype
        generator = self.generator = torch.Generator().manual_seed(0)
        counts = [-(-seq_len // page_size) for seq_len in seq_lens]
        free = (torch.randperm(sum(counts) + SPARE_PAGES - 1, generator=generator) + 1).tolist()
        table = torch.zeros(len(counts), max(counts) + spare_columns, dtype=torch.int64)
        kv = torch.full((sum(counts) + SPARE_PAGES, 2, heads[1], page_size, head_dim), float("nan"))
        for seq, seq_len in enumerate(seq_lens):
            table[seq, : counts[seq]] = torch.tensor([free.pop() for _ in range(counts[seq])])
            for j in range(seq_len):
                values = torch.randn(2, heads[1], head_dim, generator=generator)
                kv[table[seq, j // page_size], :, :, j % page_size] = values
        self.kv, self.table = kv.to(DEVICE, dtype), table.to(DEVICE)
        self.lens = torch.tensor(seq_lens, device=DEVICE)
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).to(DEVICE, torch.int32)
        self.qkv = torch.randn(sum(query_lens), (heads[0] + 2 * heads[1]) * head_dim, generator=generator)
        self.qkv = self.qkv.to(DEVICE, dtype)
        self.positions = self.tree = None
        if tree_before is not None:
            self.positions, self.tree = self._tree(tree_before)

    @property
    def q(self) -> torch.Tensor:
        """A view of qkv, strided by token."""
        return self.qkv.view(len(self.qkv), -1, self.head_dim)[:, : self.num_heads]

    def _tree(self, most_before: int) -> tuple[torch.Tensor, Tree]:
        """Each new token hangs on a random one of the tree and sees its ancestors and itself; its position is its
        depth. The tree began `most_before` slots before the new tokens, or where the sequence did."""
        visible = torch.zeros(sum(self.query_lens), max(self.query_lens) + most_before, dtype=torch.bool)
        positions, starts, row = [], [], 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            num_before = min(most_before, seq_len - query_len)
            for i in range(query_len):
                if i > 0:
                    parent = int(torch.randint(i, (1,), generator=self.generator))
                    visible[row + i] = visible[row + parent]
                elif num_before:
                    visible[row, int(torch.randint(num_before, (1,), generator=self.generator))] = True
                visible[row + i, num_before + i] = True
                positions.append(seq_len - query_len - num_before + int(visible[row + i].sum()) - 1)
            starts.append(seq_len - query_len - num_before)
            row += query_len
        return torch.tensor(positions, device=DEVICE), Tree(torch.tensor(starts, device=DEVICE), visible.to(DEVICE))

    def decode(self, window: int | None = None, **tiles: int) -> torch.Tensor:
        plan = Plan.uniform(
            self.table, self.lens, self.query_lens[0], self.page_size, self.tree, self.positions, is_stored=True
        )
        assert plan.starts is None
        chosen = DecodeTiles.choose(self.q, self.kv, len(self.table))._replace(**tiles)
        return decode_attention(self.q, self.kv, plan, window, chosen)

    def extend(self, window: int | None = None, **tiles: int) -> torch.Tensor:
        plan = Plan.ragged(self.table, self.lens, self.starts, len(self.qkv), self.page_size)
        return extend_attention(self.q, self.kv, plan, window, ExtendTiles.choose(self.kv)._replace(**tiles))

    def check(self, out: torch.Tensor, window: int | None = None) -> None:
        expected = paged_attention_ref(
            self.q, self.kv.nan_to_num(), self.table, self.query_lens, self.seq_lens, window, self.positions, self.tree
        )
        torch.testing.assert_close(out, expected, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])


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
    case.check(case.extend(window, block_n=16), window)


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
    ("head_dim", "dtype"),
    [(16, torch.float16), (20, torch.float32), (80, torch.bfloat16), (128, torch.bfloat16), (256, torch.float16)],
    ids=str,
)
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and IS_INTERPRETED:
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices")
    case = Case((3, 3), (40, 9), (2, 1), head_dim=head_dim, dtype=dtype)
    out = case.decode()
    assert out.dtype == dtype and out.is_contiguous()
    case.check(out)
    out = case.extend()
    assert out.dtype == dtype and out.is_contiguous()
    case.check(out)


@pytest.mark.parametrize(("page_size", "heads"), [(1, (3, 1)), (3, (2, 2)), (16, (8, 2)), (64, (3, 1))], ids=str)
def test_chunks(page_size: int, heads: tuple[int, int]) -> None:
    """Ragged: fresh prompts, chunks over a prefix, a decode step, and whole tiles of keys that need no mask."""
    query_lens, seq_lens = (21, 1, 7, 30), (21, 9, 60, 54)
    case = Case(query_lens, seq_lens, heads, page_size=page_size)
    case.check(case.extend(block_m=32, block_n=16))


def test_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one search step for the sequence of a tile and of a token, and sequences without tokens."""
    monkeypatch.setattr(triton_extend, "_SEQS", 4)
    query_lens = (1, 0, 17, 2, 5, 0, 0, 13, 4, 1)
    case = Case(query_lens, tuple(query_len + i % 3 for i, query_len in enumerate(query_lens)), (2, 1), page_size=4)
    case.check(case.extend(block_m=16, block_n=16))


def test_long_uniform_chunks_are_ragged_ones() -> None:
    case = Case((70, 70), (70, 90), (2, 1))
    plan = Plan.uniform(case.table, case.lens, 70, case.page_size)
    assert plan.starts is not None and plan.starts.tolist() == [0, 70, 140]
    case.check(extend_attention(case.q, case.kv, plan))


def test_padding_rows() -> None:
    """Rows whose pages are all page 0: live rows are as without them; a length of 0 gives 0."""
    case = Case((2, 2), (30, 9), page_size=4)
    expected = case.decode(num_slots=2)
    table = torch.cat([case.table, torch.zeros(3, case.table.shape[1], dtype=torch.int64, device=DEVICE)])
    lens = torch.cat([case.lens, torch.tensor([2, 2, 0], device=DEVICE)])
    q = torch.cat([case.q, torch.full((6, 4, 32), float("nan"), device=DEVICE)])
    plan = Plan.uniform(table, lens, 2, case.page_size, is_stored=True)
    for num_slots in (1, 2):
        tiles = DecodeTiles.choose(q, case.kv, len(table))._replace(num_slots=num_slots)
        out = decode_attention(q, case.kv, plan, None, tiles)
        torch.testing.assert_close(out[:4], expected)
        assert (out[8:] == 0).all()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [((5,), (300,)), ((9, 1, 0, 20), (9, 200, 0, 130))], ids=str)
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
    plan = Plan.ragged(case.table, case.lens, case.starts, len(case.qkv), case.page_size)
    tiles = ExtendTiles.choose(case.kv)._replace(block_m=16, block_n=16, num_slots=20)
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


@pytest.mark.parametrize("garbage", [float("nan"), 1e30])
@pytest.mark.parametrize("seq_lens", [(2, 300, 30), (130,), (1000,)], ids=str)
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
    case.check(case.extend(block_n=16))


@pytest.mark.parametrize("num_slots", [5, 7])
@pytest.mark.parametrize(("query_len", "heads", "window"), [(1, (4, 2), None), (9, (3, 1), None), (9, (3, 1), 20)])
def test_one_long_sequence_among_short_ones(
    num_slots: int, query_len: int, heads: tuple[int, int], window: int | None
) -> None:
    """With fewer slots than twice the sequences, the last program of a sequence combines its splits."""
    case = Case((query_len,) * 3, (query_len, 300, 140), heads)
    plan = Plan.uniform(case.table, case.lens, query_len, case.page_size, is_stored=True)
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


@pytest.mark.parametrize(("head_dim", "num_per_sm"), [(32, 6), (128, 3)])
def test_choice_of_slots(head_dim: int, num_per_sm: int) -> None:
    """By shapes alone: as many programs as run at once."""
    sms = triton_attention.num_sms(torch.device(DEVICE))
    kv = torch.empty(1, 2, 2, 16, head_dim, device=DEVICE, dtype=torch.float16)
    for num_seqs in (1, 2, 5, 10_000):
        q = torch.empty(num_seqs, 2, head_dim, device=DEVICE, dtype=torch.float16)
        tiles = DecodeTiles.choose(q, kv, num_seqs)
        assert tiles.num_slots == num_per_sm * sms // 2
        assert tiles.num_stages == (2 if head_dim == 128 and num_seqs > tiles.num_slots else 3)


@pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("query_lens", [(3, 3, 3), (5, 1, 0, 9)], ids=["uniform", "ragged"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(16, torch.float32), (20, torch.float16), (80, torch.float32)], ids=str
)
def test_norm_rotate_store(with_norms: bool, head_dim: int, dtype: torch.dtype, query_lens: tuple[int, ...]) -> None:
    seq_lens = tuple(query_len + i for i, query_len in enumerate(query_lens))
    case = Case(query_lens, seq_lens, (6, 2), head_dim=head_dim, page_size=4, dtype=dtype)
    num_tokens, generator = len(case.qkv), case.generator
    angles = torch.randn(num_tokens, 1, head_dim // 2, generator=generator)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(DEVICE, dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(DEVICE, dtype)
    norms = torch.randn(2, head_dim, generator=generator).to(DEVICE, dtype).unbind(0) if with_norms else None
    heads = case.qkv.view(num_tokens, -1, head_dim).clone()
    q, k, v = heads.split([6, 2, 2], dim=1)
    if norms is not None:
        q, k = rms_norm_ref(q, norms[0], EPS), rms_norm_ref(k, norms[1], EPS)
    q, k = (rotary_ref(x.float(), cos.float(), sin.float()).to(dtype) for x in (q, k))
    expected, row = case.kv.clone(), 0
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for slot in range(seq_len - query_len, seq_len):
            page = case.table[seq, slot // 4]
            expected[page, 0, :, slot % 4], expected[page, 1, :, slot % 4] = k[row], v[row]
            row += 1
    if len(set(query_lens)) == 1:
        plan = Plan.uniform(case.table, case.lens, query_lens[0], 4)
    else:
        plan = Plan.ragged(case.table, case.lens, case.starts, num_tokens, 4)
    assert plan.rows is not None
    out = norm_rotate_store(case.qkv, cos, sin, case.kv, plan.rows, norms, EPS)
    assert out.data_ptr() == case.qkv.data_ptr()
    near = {"atol": 2e-6, "rtol": 2e-6} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 2**-9}
    torch.testing.assert_close(out, q, **near)
    torch.testing.assert_close(case.kv, expected, equal_nan=True, **near)
    assert torch.equal(case.kv[:, 1].nan_to_num(), expected[:, 1].nan_to_num())
    torch.testing.assert_close(case.qkv.view_as(heads)[:, 6:8], k, **near)
    assert torch.equal(case.qkv.view_as(heads)[:, 8:], heads[:, 8:])


def test_rows_of_slots_that_are_not_there() -> None:
    """A padding row of length 0, and slots beyond the table."""
    table = torch.tensor([[5, 6], [0, 0], [7, 8]], device=DEVICE)
    lens = torch.tensor([5, 0, 9], device=DEVICE)
    assert token_rows(table, lens, 6, 4, 2).tolist() == [23, 24, -1, -1, 35, -1]
    starts = torch.tensor([0, 1, 2, 4], dtype=torch.int32, device=DEVICE)
    assert token_rows(table, lens, 4, 4, None, starts).tolist() == [24, -1, 35, -1]


def test_a_token_without_a_row_is_stored_nowhere() -> None:
    pool = torch.full((3, 2, 2, 4, 16), 7.0, device=DEVICE)
    qkv, turn = torch.randn(1, 6 * 16, device=DEVICE), torch.ones(1, 1, 16, device=DEVICE)
    norm_rotate_store(qkv, turn, turn, pool[1:], torch.tensor([-1], device=DEVICE))
    assert (pool == 7).all()


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
        return decode_attention(q, kv, Plan.uniform(table, lens, 4, 16, tree, positions), 40)

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
    plan = Plan.uniform(case.table, case.lens, 2, case.page_size, case.tree, case.positions)
    kinds = {type(getattr(plan, field.name)) for field in dataclasses.fields(plan) if field.init}
    assert kinds <= {torch.Tensor, int, type(None)}


NOT_NUMBERS = [float("nan"), float("inf"), -float("inf")]


def hides(out: torch.Tensor, clean: torch.Tensor, sees: torch.Tensor) -> bool:
    """Whether rows [num_tokens] that see a value which is not a number are not finite, and others equal `clean`."""
    torch.testing.assert_close(out[~sees], clean[~sees])
    return bool(sees.any() and (~sees).any() and not out[sees].isfinite().any())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("number", NOT_NUMBERS)
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("way", ["decode", "decode split", "decode shared", "extend", "extend shared"])
def test_a_number_that_is_none_spoils_only_rows_that_see_it(
    way: str, half: int, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of five new tokens of one sequence: the two before it do not see it, nor does the other sequence."""
    monkeypatch.setattr(triton_extend, "_MIN_SPLIT", 32 if way == "extend shared" else 512)
    case = Case((5, 5), (150, 40), (2, 1), page_size=10)
    num_slots = {"decode": 1, "decode split": 9, "decode shared": 3, "extend": 1, "extend shared": 20}[way]

    def run() -> torch.Tensor:
        if way.startswith("decode"):
            return case.decode(num_slots=num_slots, block_n=16)
        return case.extend(num_slots=num_slots, block_m=16, block_n=16)

    clean, slot = run(), 147
    case.kv[case.table[0, slot // 10], half, :, slot % 10] = number
    sees = torch.tensor([False, False, True, True, True] + [False] * 5, device=DEVICE)
    if half == 0 and number != number:
        assert hides(run(), clean, sees)
    else:  # the score of an infinite key is an infinity of either sign, which a softmax ignores or makes NaN of
        out = run()
        torch.testing.assert_close(out[~sees], clean[~sees])
        assert half == 0 or not out[sees].isfinite().any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", NOT_NUMBERS)
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_a_number_that_is_none_spoils_only_its_branch_of_a_tree(half: int, number: float) -> None:
    case = Case((7, 7), (9, 120), (2, 1), page_size=3, tree_before=2)
    assert case.tree is not None
    clean, node, num_before = case.decode(num_slots=2, block_n=16), 2, 2
    slot = 120 - 7 + node
    case.kv[case.table[1, slot // 3], half, :, slot % 3] = number
    sees = torch.cat([torch.zeros(7, dtype=torch.bool), case.tree.visible[7:, num_before + node].cpu()]).to(DEVICE)
    out = case.decode(num_slots=2, block_n=16)
    torch.testing.assert_close(out[~sees], clean[~sees])
    assert sees.any() and (~sees[7:]).any()
    assert (half == 0 and number == number) or not out[sees].isfinite().any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_number_that_is_none_and_left_the_window_spoils_nothing(query_len: int) -> None:
    case = Case((query_len,) * 2, (90, 40), (2, 1), page_size=10)
    clean = case.decode(20, block_n=64), case.extend(20, block_m=16, block_n=64)
    slot = 90 - query_len - 20  # one before the first that the first new token sees, in a tile with it
    case.kv[case.table[0, slot // 10], :, :, slot % 10] = float("nan")
    torch.testing.assert_close((case.decode(20, block_n=64), case.extend(20, block_m=16, block_n=64)), clean)


@pytest.mark.parametrize("page_size", [1, 3, 10, 48])
@pytest.mark.parametrize("heads", [(5, 1), (14, 2)], ids=["group 5", "group 7"])
@pytest.mark.parametrize("head_dim", [10, 72, 576])
def test_odd_shapes(page_size: int, heads: tuple[int, int], head_dim: int) -> None:
    case = Case((3, 3), (40, 9), heads, head_dim=head_dim, page_size=page_size)
    case.check(case.decode())
    case.check(case.extend())


@pytest.mark.parametrize("num_slots", [40, 128])
def test_more_splits_than_a_warp_combines(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One KV head on a device of many processors."""
    monkeypatch.setattr(triton_attention, "num_sms", lambda _: 132)
    case = Case((1,), (64 * 130,), (2, 1), page_size=48)
    case.check(case.decode(num_slots=num_slots))
