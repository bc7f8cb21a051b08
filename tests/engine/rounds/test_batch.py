"""The layout of a forward's input, and its way to a device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from baton.engine.rounds import batch as batches
from baton.engine.rounds.batch import ForwardBatch, aligned, upload
from baton.engine.work import BatchRow
from baton.kernels.attention.attention import paged_attention, paged_attention_ref

PAGE_SIZE = 4
ROWS = [BatchRow([7, 8, 9], 4, [3, 5, 9], num_logits=2), BatchRow([1], 0, [2]), BatchRow([6, 6], 0, [4], 0)]


def test_rows_lie_end_to_end_in_order() -> None:
    batch = ForwardBatch.build(ROWS, PAGE_SIZE, "cpu")
    assert batch.num_tokens == 6
    assert batch.input_ids.tolist() == [7, 8, 9, 1, 6, 6]
    assert batch.positions.tolist() == [4, 5, 6, 0, 0, 1]
    assert (batch.query_lens, batch.prefix_lens, batch.seq_lens.tolist()) == ((3, 1, 2), (4, 0, 0), [7, 1, 2])
    assert batch.block_table.tolist() == [[3, 5], [2, 0], [4, 0]]
    assert batch.logit_rows is not None and batch.logit_rows.tolist() == [1, 2, 3]
    assert batch.starts is not None and (batch.starts.tolist(), batch.starts.dtype) == ([0, 3, 4, 6], torch.int32)


def test_an_idle_rank_has_no_rows() -> None:
    """All tensors have their ranks and dtypes, so that layers and collectives take them."""
    batch, other = ForwardBatch.build([], PAGE_SIZE, "cpu"), ForwardBatch.build(ROWS, PAGE_SIZE, "cpu")
    assert batch.num_tokens == 0 and batch.query_lens == () and batch.block_table.shape == (0, 0)
    assert batch.starts is not None and batch.starts.tolist() == [0]
    for name in ("input_ids", "positions", "seq_lens", "block_table", "logit_rows", "starts"):
        ours, theirs = getattr(batch, name), getattr(other, name)
        assert (ours.dtype, ours.dim()) == (theirs.dtype, theirs.dim()), name


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (BatchRow([1, 2], 7, [4, 5]), "2 pages for 9 tokens"),
        (BatchRow([], 7, [4, 5]), "num_logits=1"),
        (BatchRow([1, 2], 0, [4], 3), "num_logits=3"),
    ],
)
def test_a_row_that_cannot_be_computed_is_our_bug(row: BatchRow, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        ForwardBatch.build([row], PAGE_SIZE, "cpu")


def test_a_uniform_batch_is_the_one_that_build_makes_of_its_rows() -> None:
    """It begins with tensors, and all logits are wanted."""
    rows = [BatchRow([7, 8, 9], 4, [3, 5], num_logits=3), BatchRow([1, 2, 6], 0, [2, 0], num_logits=3)]
    built = ForwardBatch.build(rows, PAGE_SIZE, "cpu")
    input_ids, positions = torch.tensor([[7, 8, 9], [1, 2, 6]]), torch.tensor([[4, 5, 6], [0, 1, 2]])
    batch = ForwardBatch.uniform(input_ids, positions, torch.tensor([7, 3]), built.block_table, PAGE_SIZE)
    for name in ("input_ids", "positions", "seq_lens", "block_table"):
        assert torch.equal(getattr(batch, name), getattr(built, name)), name
    assert batch.query_lens == built.query_lens and batch.logit_rows is None and batch.tree is None


@pytest.mark.parametrize("window", [None, 3])
def test_the_attention_plan_is_of_these_sequences(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(10, 2, 2, PAGE_SIZE, 8, generator=generator)
    q = torch.randn(6, 4, 8, generator=generator)
    batch = ForwardBatch.build(ROWS, PAGE_SIZE, "cpu")
    plan = batch.attention_plan(2, [None, window], torch.float32)
    expected = paged_attention_ref(q, kv, batch.block_table, batch.query_lens, batch.seq_lens.tolist(), window)
    torch.testing.assert_close(paged_attention(q, kv, plan, window), expected, atol=2e-6, rtol=0)


NUMBERS = [[5, 6, 7], [[1, 2], [3, 4]], [], [9], np.zeros((2, 0), np.int32)]


def test_arrays_go_to_a_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins at 16 bytes of the copy, which here stays on the host."""
    copied: list[torch.Tensor] = []

    def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        copied.append(tensor)
        return tensor

    monkeypatch.setattr(batches, "to_device", to_device)
    on_host, on_device = upload(NUMBERS, "cpu"), upload(NUMBERS, "cuda")
    assert not any(each.data_ptr() == copied[0].data_ptr() for each in on_host) and len(copied) == 1
    for ours, theirs, numbers in zip(on_host, on_device, NUMBERS, strict=True):
        assert ours.dtype == theirs.dtype == torch.int64 and ours.shape == theirs.shape == np.shape(numbers)
        assert ours.tolist() == theirs.tolist() == np.asarray(numbers).tolist()
        assert (theirs.data_ptr() - copied[0].data_ptr()) % 16 == 0


@pytest.mark.parametrize(("sizes", "offsets"), [([], [0]), ([3, 2, 1], [0, 4, 6, 8]), ([0, 5, 0], [0, 0, 6, 6])])
def test_every_array_begins_at_16_bytes(sizes: Sequence[int], offsets: list[int]) -> None:
    assert aligned(sizes) == offsets
