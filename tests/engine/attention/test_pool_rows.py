"""The rows of tokens in a pool beside that of KV: where they are stored, and which of them a token sees."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from baton.engine.attention.pool_rows import PoolRows, SeenRows
from baton.engine.rounds.batch import ForwardBatch, MixedBatch
from baton.engine.work import BatchRow
from baton.kernels.attention.attention import Tree

PAGE_SIZE, WIDTH = 4, 6
PAGES = [[3, 7, 2], [9, 5, 1]]  # of two sequences


def pool() -> torch.Tensor:
    """Return a pool of three layers with two planes of one head, [3, 10, 2, 1, PAGE_SIZE, WIDTH / 2]."""
    return torch.full((3, 10, 2, 1, PAGE_SIZE, WIDTH // 2), float("nan"))


def numbers(first: int, count: int) -> torch.Tensor:
    """Return a row for each of `count` tokens, [count, WIDTH]: token i has numbers from 10 * (first + i)."""
    return 10.0 * torch.arange(first, first + count).unsqueeze(1) + torch.arange(WIDTH)


def stored(rows: PoolRows) -> list[SeenRows]:
    return list(rows.sequences("index", 1))


@pytest.mark.parametrize("chunks", [[11], [1, 3, 7], [4, 4, 3]], ids=str)
def test_a_row_lies_at_its_tokens_slot_however_the_text_is_divided(chunks: list[int]) -> None:
    pools, start = {"index": pool()}, 0
    for num in chunks:
        batch = ForwardBatch.build([BatchRow([0] * num, start, pages) for pages in PAGES], PAGE_SIZE, "cpu")
        rows = PoolRows.of(batch, pools)
        rows.store("index", 1, torch.cat([numbers(start, num), numbers(100 + start, num)]))
        start += num
    for at, seen in enumerate(stored(rows)):
        assert torch.equal(seen.stored, numbers(100 * at, 11))
        assert seen.tokens == slice(at * chunks[-1], (at + 1) * chunks[-1])
        assert seen.is_seen.sum(1).tolist() == list(range(12 - chunks[-1], 13))[: chunks[-1]]
        assert not seen.is_seen.logical_not().tril(11 - chunks[-1]).any(), "a token sees all before it and itself"
    layers = pools["index"].isnan().flatten(1).all(1).tolist()
    assert layers == [True, False, True]
    page, slot = PAGES[1][9 // PAGE_SIZE], 9 % PAGE_SIZE
    assert torch.equal(pools["index"][1, page, :, 0, slot].flatten(), numbers(109, 1)[0])


def test_the_host_needs_no_lengths_to_store() -> None:
    """The batch of a graph has more tokens than its sequences, and does not say how many each has."""
    batch = ForwardBatch.build([BatchRow([0] * 3, 2, PAGES[0]), BatchRow([0] * 2, 0, PAGES[1])], PAGE_SIZE, "cpu")
    padded = torch.zeros(8, dtype=torch.int64)
    of_graph = dataclasses.replace(batch, input_ids=padded, positions=padded, query_lens=(), prefix_lens=())
    pages, slots = PoolRows.of(of_graph, {}).slots
    assert pages.tolist() == [3, 3, 7, 9, 9, 0, 0, 0] and slots.tolist()[:5] == [2, 3, 0, 0, 1]
    uniform = ForwardBatch.uniform(
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.tensor([5, 0]),  # padding has no tokens
        torch.tensor([PAGES[0], [0] * 3]),
        PAGE_SIZE,
    )
    pages, slots = PoolRows.of(uniform, {}).slots
    assert pages.tolist() == [3, 3, 7, 0, 0, 0] and slots.tolist()[:3] == [2, 3, 0]


def test_the_first_of_two_batches_sees_the_rows_of_the_second() -> None:
    """The last token of a sequence in a round follows its chunk in the same forward."""
    first = ForwardBatch.build([BatchRow([0], 6, PAGES[0])], PAGE_SIZE, "cpu")
    second = ForwardBatch.build([BatchRow([0] * 6, 0, PAGES[0])], PAGE_SIZE, "cpu")
    rows = PoolRows.of(MixedBatch.of(first, second), {"index": pool()})
    rows.store("index", 1, torch.cat([numbers(6, 1), numbers(0, 6)]))
    last, chunk = stored(rows)
    assert (last.tokens, chunk.tokens) == (slice(0, 1), slice(1, 7))
    assert torch.equal(last.stored, numbers(0, 7)) and last.is_seen.all()
    assert torch.equal(chunk.stored, numbers(0, 6)) and torch.equal(chunk.is_seen, torch.ones(6, 6).tril().bool())


def test_a_node_of_a_tree_sees_its_branch() -> None:
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    batch = ForwardBatch.uniform(
        torch.zeros(1, 3, dtype=torch.int64),
        torch.tensor([[5, 6, 6]]),
        torch.tensor([8]),
        torch.tensor(PAGES[:1]),
        PAGE_SIZE,
        Tree(torch.tensor([5]), visible),
    )
    rows = PoolRows.of(batch, {"index": pool()})
    rows.store("index", 1, numbers(5, 3))
    [seen] = stored(rows)
    assert torch.equal(seen.stored[5:], numbers(5, 3))
    assert torch.equal(seen.is_seen[:, 5:], visible) and seen.is_seen[:, :5].all()
