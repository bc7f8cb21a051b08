import torch

from baton.engine.sampling.logprobs import compute_logprobs


def test_values_are_those_of_log_softmax() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    token_ids = torch.tensor([3, 49, 0, 7])
    rows = compute_logprobs(logits, token_ids, 20).to_rows([None, 0, 5, 20])
    expected = torch.log_softmax(logits.double(), -1)
    assert rows[0] is None
    for row, num in ((1, 0), (2, 5), (3, 20)):
        got = rows[row]
        assert got is not None
        assert len(got.top_ids) == len(got.top_logprobs) == num
        assert abs(got.logprob - expected[row, token_ids[row]].item()) < 1e-5
        values, ids = expected[row].topk(num)
        assert list(got.top_ids) == ids.tolist()
        torch.testing.assert_close(torch.tensor(got.top_logprobs), values.float(), rtol=0, atol=1e-5)


def test_equal_ones_come_by_ascending_id() -> None:
    result = compute_logprobs(torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]]), torch.tensor([4]), 4)
    [row] = result.to_rows([4])
    assert row is not None
    assert row.top_ids == (1, 3, 4, 2)
    assert row.logprob == row.top_logprobs[0]


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    logits = torch.randn(6, 4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    token_ids = logits.argmax(-1)
    together = compute_logprobs(logits, token_ids, 3)
    for row in range(6):
        alone = compute_logprobs(logits[row : row + 1], token_ids[row : row + 1], 3)
        assert alone.to_rows([3])[0] == together.to_rows([3] * 6)[row]


def test_more_than_the_vocabulary() -> None:
    result = compute_logprobs(torch.zeros(1, 3), torch.tensor([0]), 20)
    [row] = result.to_rows([20])
    assert row is not None
    assert row.top_ids == (0, 1, 2)
