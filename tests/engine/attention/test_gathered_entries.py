"""Where the entries of windows lie, and when they are made: the same however a text is divided, and after drafts."""

from __future__ import annotations

import pytest
import torch

from baton.engine.attention.compressed import EntryPool
from baton.engine.attention.gathered_entries import GatheredEntries
from baton.engine.attention.pool_rows import PoolRows
from baton.engine.rounds.batch import ForwardBatch, MixedBatch
from baton.engine.work import BatchRow
from baton.kernels.entries.entries import compress, rotate_pairs_
from baton.kernels.products.norm import Norm

PAGE_SIZE, RATE, WIDTH, NUM = 8, 4, 6, 30
PAGES = [[3, 7, 2, 6], [9, 5, 1, 4]]  # of two sequences
TAILS = [[1, 9, 8, 2], [4, 3, 7, 5]]
INPUTS = torch.randn(2, NUM, 4 * WIDTH, generator=torch.Generator().manual_seed(0))
FREQUENCIES = torch.tensor([1.0, 0.1])


def pools() -> dict[str, torch.Tensor]:
    nan = float("nan")
    return {
        "inputs": torch.full((2, 10, 1, 1, PAGE_SIZE, 4 * WIDTH), nan),
        "entries": torch.full((2, 10, 1, 1, PAGE_SIZE, -(-WIDTH // RATE)), nan),
    }


def entry_pool() -> EntryPool:
    generator = torch.Generator().manual_seed(1)
    bias, weight = torch.randn(RATE, 2 * WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)
    return EntryPool("inputs", "entries", 1, bias, Norm(weight, 1e-6), FREQUENCIES)


def run(pools: dict[str, torch.Tensor], batch: ForwardBatch | MixedBatch, inputs: torch.Tensor) -> GatheredEntries:
    context = begin(pools, batch)
    context.compress(entry_pool(), inputs)
    return context


def begin(pools: dict[str, torch.Tensor], batch: ForwardBatch | MixedBatch) -> GatheredEntries:
    return GatheredEntries(PoolRows.of(batch, pools), PoolRows.of(batch.of_tails(), pools))


def rows_of(start: int, stop: int) -> tuple[ForwardBatch, torch.Tensor]:
    rows = [BatchRow([0] * (stop - start), start, pages, tail=tail) for pages, tail in zip(PAGES, TAILS, strict=True)]
    return ForwardBatch.build(rows, PAGE_SIZE, "cpu"), INPUTS[:, start:stop].flatten(0, 1)


def check(context: GatheredEntries, num_tokens: int = NUM) -> None:
    """Compare the entries of both sequences with those that are made at once."""
    pool = entry_pool()
    for inputs, new in zip(INPUTS, context.kept.new_rows(), strict=True):
        num = num_tokens // RATE
        expected = compress(inputs[: num * RATE], pool.bias, pool.norm, has_before=False).unsqueeze(1)
        angles = (RATE * torch.arange(num).view(-1, 1, 1)) * FREQUENCIES
        rotate_pairs_(expected, angles.cos(), angles.sin())
        assert torch.equal(context.entries(pool, new), expected.squeeze(1))


@pytest.mark.parametrize("chunks", [[NUM], [1] * NUM, [3, 1, 4, 9, 2, 7, 4], [8, 8, 8, 6]], ids=str)
def test_entries_are_the_same_however_a_text_is_divided(chunks: list[int]) -> None:
    own, start = pools(), 0
    for num in chunks:
        context = run(own, *rows_of(start, start + num))
        check(context, start + num)
        start += num
    assert own["entries"][0].isnan().all(), "of another layer"


def test_the_token_in_place_of_a_rejected_draft_makes_the_entry_again() -> None:
    own = pools()
    run(own, *rows_of(0, 10))
    batch, inputs = rows_of(10, 18)
    run(own, batch, torch.where(torch.arange(16).view(-1, 1) % 8 < 1, inputs, 5.0))  # drafts behind the first token
    for start in range(11, NUM, 3):
        context = run(own, *rows_of(start, min(NUM, start + 3)))
    check(context)


def test_a_whole_page_never_changes() -> None:
    """It may be offered, or shared by other requests."""
    own = pools()
    run(own, *rows_of(0, 17))
    before = {name: pool.clone() for name, pool in own.items()}
    run(own, *rows_of(17, NUM))
    for name, pool in own.items():
        for pages in TAILS if name == "inputs" else PAGES:
            assert torch.equal(pool[1, pages[:2]].nan_to_num(), before[name][1, pages[:2]].nan_to_num()), name


def test_a_window_may_end_in_the_other_batch_of_a_forward() -> None:
    """The first batch has the token that follows those of the second."""
    own = pools()
    run(own, *rows_of(0, 24))
    second, inputs = rows_of(24, 29)
    first, last = rows_of(29, NUM)
    context = run(own, MixedBatch.of(first, second), torch.cat([last, inputs]))
    pool = entry_pool()
    check(begin(dict(context.kept.pools), first))
    assert [new.stop for new in context.kept.new_rows()] == [29, 29, NUM, NUM]
    assert len(context.entries(pool, next(context.kept.new_rows()))) == NUM // RATE


def test_tokens_behind_the_last_page_are_left_out() -> None:
    """Rows of a round may run past the pages of a sequence near its end."""
    own = pools()
    run(own, *rows_of(0, 30))
    table = torch.tensor(PAGES)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    lens, tails = torch.tensor([34, 34]), torch.tensor(TAILS)
    batch = ForwardBatch.uniform(ids, ids + 29, lens, table, PAGE_SIZE, tail_table=tails)
    context = run(own, batch, torch.ones(10, 4 * WIDTH))
    assert [(new.start, new.stop, new.tokens) for new in context.kept.new_rows()] == [
        (29, 32, slice(0, 3)),
        (29, 32, slice(5, 8)),
    ]
