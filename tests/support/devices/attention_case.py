"""Random paged sequences for tests of the Triton kernels of attention, compared with attention's specification.

Import this module only after `pytest.importorskip("triton")`.
"""

from __future__ import annotations

import torch
from quantized import fp8_numbers, fp8_pool
from triton_device import DEVICE, IS_INTERPRETED

from baton.kernels.attention.attention import Tree, paged_attention_ref
from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.triton_attention import DecodeTiles, decode_attention
from baton.kernels.attention.triton_extend import ExtendTiles, extend_attention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SPARE_PAGES = 3  # owned by nobody, NaN

HEADS_IN_DTYPES = [  # (head_dim, dtype)
    (16, torch.float16),
    (20, torch.float32),
    *(
        [] if IS_INTERPRETED else [(80, torch.bfloat16), (128, torch.bfloat16)]
    ),  # as the interpreter cannot multiply bfloat16
    (256, torch.float16),
]
ODD_SHAPES = [  # (page_size, (num_heads, num_kv_heads), head_dim): groups of 5 and 7, no powers of two
    (1, (5, 1), 10),
    (3, (14, 2), 10),
    (10, (5, 1), 72),
    (48, (14, 2), 72),
    (1, (14, 2), 72),
    (3, (5, 1), 576),
    (10, (7, 1), 576),
    (48, (5, 1), 576),
]


class Case:
    """Random queries over a pool that is NaN but for the slots that sequences have filled; columns without a page name
    page 0, which is NaN too unless a sequence (padding) has nothing else."""

    def __init__(
        self, query_lens, seq_lens, heads=(4, 2), head_dim=32, page_size=16, dtype=torch.float32, tree_before=None,
        spare_columns=1, in_fp8=False, value_dim=None,
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
        if in_fp8:
            self.kv = fp8_pool(self.kv)
        self.values = None  # a pool of their own, if `value_dim` says how wide they are
        if value_dim is not None:
            self.values, self.kv = self.kv[:, 1:, ..., :value_dim].contiguous(), self.kv[:, :1].contiguous()
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

    def sinks(self) -> torch.Tensor:
        """A sink per query head: a large one, which takes most of the weight, a small one, and ordinary ones."""
        sinks = torch.randn(self.num_heads, generator=self.generator)
        sinks[0], sinks[-1] = 9.0, -60.0
        return sinks.to(DEVICE)

    def decode(self, window: int | None = None, sinks: torch.Tensor | None = None, **tiles: int) -> torch.Tensor:
        plan = PagedPlan.uniform(
            self.table, self.lens, self.query_lens[0], self.page_size, self.tree, self.positions, is_stored=True
        )
        assert plan.starts is None
        chosen = DecodeTiles.choose(self.q, self.kv, len(self.table))._replace(**tiles)
        return decode_attention(self.q, self.kv, plan, window, chosen, sinks=sinks, values=self.values)

    def extend(self, window: int | None = None, sinks: torch.Tensor | None = None, **tiles: int) -> torch.Tensor:
        plan = PagedPlan.ragged(self.table, self.lens, self.starts, len(self.qkv), self.page_size)
        tiles_of = ExtendTiles.choose(self.q, self.kv)._replace(**tiles)
        return extend_attention(self.q, self.kv, plan, window, tiles_of, sinks=sinks, values=self.values)

    def check(self, out: torch.Tensor, window: int | None = None, sinks: torch.Tensor | None = None) -> None:
        kv = fp8_numbers(self.kv).to(self.dtype) if self.kv.dtype == torch.float8_e4m3fn else self.kv
        expected = paged_attention_ref(
            self.q, kv.nan_to_num(), self.table, self.query_lens, self.seq_lens, window, self.positions, self.tree,
            sinks=sinks, values=None if self.values is None else self.values.nan_to_num(),
        )  # fmt: skip
        torch.testing.assert_close(out, expected, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])


NOT_NUMBERS = [float("nan"), float("inf"), -float("inf")]


def assert_spoils_only(out: torch.Tensor, clean: torch.Tensor, sees: torch.Tensor, half: int, number: float) -> None:
    """Assert that rows [num_tokens] which see `number` in a key (`half` 0) or a value (1) are not finite, and that the
    others equal `clean`. The score of an infinite key is an infinity of either sign, which a softmax ignores or makes
    NaN of."""
    torch.testing.assert_close(out[~sees], clean[~sees])
    assert sees.any() and (~sees).any()
    assert (half == 0 and number == number) or not out[sees].isfinite().any()
