"""The layer over a window and entries: what a token sees of them, and the form of its output projection."""

from __future__ import annotations

from typing import cast

import torch

from baton.engine.attention.compressed import KV, CompressedAttention, EntryPool, WindowHeads
from baton.engine.attention.gathered_entries import GatheredEntries
from baton.engine.attention.pool_rows import PoolRows
from baton.engine.checkpoint.model_config import IndexConfig
from baton.engine.layers.compressed_attention import Compressor, EntryIndexer, GroupedOut, WindowedAttention
from baton.engine.products.groups import DenseGroups
from baton.engine.products.linear import Linear
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.kernels.products.norm import Norm

PAGE_SIZE, RATE, WIDTH, SIZE, HEADS, RANK, WINDOW, PICKS = 8, 4, 8, 16, 2, 6, 3, 2
FREQUENCIES = torch.tensor([1.0, 0.1])


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(out_size: int, in_size: int, seed: int) -> Linear:
    return Linear.of(random(out_size, in_size, seed=seed) / in_size**0.5)


def compressor(kind: str, width: int, seed: int) -> Compressor:
    pool = EntryPool(
        f"{kind}_inputs", kind, 0, random(RATE, 2 * width, seed=seed), Norm(torch.ones(width), 1e-6), FREQUENCIES
    )
    return Compressor(linear(4 * width, SIZE, seed + 1), pool)


def layer(*, is_indexed: bool) -> WindowedAttention:
    index = IndexConfig(3, 6, PICKS, is_interleaved=True)
    heads = WindowHeads(0, WINDOW, 1e-6, Norm(torch.ones(WIDTH), 1e-6), FREQUENCIES, random(HEADS, seed=3))
    return WindowedAttention(
        linear(RANK + WIDTH, SIZE, 1),
        Norm(torch.ones(RANK), 1e-6),
        linear(HEADS * WIDTH, RANK, 2),
        heads,
        GroupedOut(DenseGroups(random(2, 5, WIDTH, seed=4)), linear(SIZE, 10, 5)),
        compressor("entries", WIDTH, 6),
        EntryIndexer(index, compressor("index", 6, 8), linear(18, RANK, 10), random(3, SIZE, seed=11))
        if is_indexed
        else None,
    )


def run(attention: WindowedAttention, x: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Return the outputs of a text in chunks."""
    widths = {KV: WIDTH, "entries": 2, "entries_inputs": 4 * WIDTH, "index": 2, "index_inputs": 24}
    pools = {name: torch.full((1, 9, 1, 1, PAGE_SIZE, width), float("nan")) for name, width in widths.items()}
    outputs, start = list[torch.Tensor](), 0
    for num in chunks:
        batch = ForwardBatch.build([BatchRow([0] * num, start, [4, 2, 7, 1])], PAGE_SIZE, "cpu")
        rows = PoolRows.of(batch, pools)
        outputs.append(attention(x[start : start + num], GatheredEntries(rows, rows)))
        start += num
    return torch.cat(outputs)


def test_the_output_does_not_depend_on_chunks() -> None:
    x = random(30, SIZE, seed=0)
    for is_indexed in (False, True):
        attention = layer(is_indexed=is_indexed)
        whole = run(attention, x, [30])
        for chunks in ([1] * 30, [3, 1, 4, 9, 13]):
            torch.testing.assert_close(run(attention, x, chunks), whole, atol=1e-5, rtol=1e-5)


def test_the_token_that_ends_a_window_sees_its_entry_and_the_one_before_does_not() -> None:
    attention, x = layer(is_indexed=False), random(12, SIZE, seed=0)
    before = run(attention, x, [12])
    changed = x.clone()
    changed[4] += 1  # in the window of tokens 4 to 7, and seen by itself and the next two
    moved = (run(attention, changed, [12]) - before).abs().amax(1) > 1e-6
    assert moved.tolist() == [False] * 4 + [True] * 8
    changed = x.clone()
    changed[0] += 1
    moved = (run(attention, changed, [12]) - before).abs().amax(1) > 1e-6
    assert moved.tolist() == [True] * 12, "the entry at token 3 and, by overlap, that at token 7"
    alone = run(attention, x[:3], [3]), run(attention, changed[:3], [3])
    assert not torch.equal(*alone)


def test_an_indexer_leaves_out_all_but_its_picks() -> None:
    """With as many picks as there are entries it changes nothing."""
    x = random(30, SIZE, seed=0)
    both = [run(layer(is_indexed=each), x, [30]) for each in (False, True)]
    assert torch.equal(both[0][: RATE * (PICKS + 1) - 1], both[1][: RATE * (PICKS + 1) - 1])
    assert (both[0][-1] - both[1][-1]).abs().max() > 1e-3


def test_each_group_of_heads_has_a_product_of_its_own() -> None:
    groups, out = random(2, 5, WIDTH, seed=1), linear(SIZE, 10, 2)
    attended = random(4, HEADS, WIDTH, seed=3)
    parts = torch.cat([attended[:, group] @ groups[group].T for group in range(2)], 1)
    context = cast(CompressedAttention, GatheredEntries)
    torch.testing.assert_close(GroupedOut(DenseGroups(groups), out)(attended, context), out(parts))
