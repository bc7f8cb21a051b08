"""Log-probabilities by each backend that runs here, against log-softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, random

from baton.kernels.operations import preferring
from baton.kernels.sampling import logprobs
from baton.kernels.sampling.logprobs import TopLogprobs, top_logprobs

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud


def check(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogprobs:
    found = top_logprobs(logits, token_ids, num_top)
    expected = logits.double().log_softmax(-1)
    best = expected.topk(num_top).values.float()
    chosen = expected.gather(1, token_ids.unsqueeze(1)).squeeze(1).float()
    # A sum of exponentials has about one rounding per halving. It is then added to numbers as large as the logits.
    roundings = len(bin(logits.shape[1])) + 2 * float(logits.float().abs().nan_to_num(posinf=0).max())
    atol = roundings * 2.0**-24
    torch.testing.assert_close(found.chosen, chosen, rtol=1e-6, atol=atol)
    torch.testing.assert_close(found.top_logprobs, best, rtol=1e-6, atol=atol)
    there = expected.gather(1, found.top_ids).float()
    torch.testing.assert_close(found.top_logprobs, there, rtol=1e-6, atol=atol)
    assert all(len(set(row)) == num_top for row in found.top_ids.tolist()), "an id twice"
    return found


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocab_size", "num_top"), [(3, 5000, 20), (2, 2049, 0), (1, 1, 1), (4, 7, 5)])
def test_values(kind: str, num_rows: int, vocab_size: int, num_top: int, dtype: torch.dtype) -> None:
    logits = random(num_rows, vocab_size, dtype=dtype, seed=num_top, scale=4.0)
    token_ids = torch.arange(num_rows, device=DEVICE) * 1237 % vocab_size
    with preferring(kind):  # type: ignore[arg-type]
        check(logits, token_ids, num_top)
        check(torch.cat([logits, logits], 1)[:, :vocab_size], token_ids, num_top)  # rows that lie apart


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_equal_ones_come_by_ascending_id_and_excluded_ones_last(kind: str) -> None:
    logits = torch.full((2, 3000), -float("inf"), device=DEVICE)
    logits[0, [2900, 5, 70]] = 1.5
    logits[1] = 0.0
    with preferring(kind):  # type: ignore[arg-type]
        found = top_logprobs(logits, torch.tensor([70, 2999], device=DEVICE), 3)
        only = top_logprobs(logits, torch.tensor([8, 8], device=DEVICE), 1)
    assert found.top_ids[0].tolist() == [5, 70, 2900]
    torch.testing.assert_close(found.top_logprobs[0].cpu(), torch.full((3,), -1.0986123))
    torch.testing.assert_close(found.chosen.cpu(), torch.tensor([-1.0986123, -8.0063676]))
    assert only.chosen[0] == -float("inf")


def test_many_rows_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token_ids = random(7, 50), torch.arange(7, device=DEVICE)
    with preferring("reference"):
        whole = check(logits, token_ids, 4)
        monkeypatch.setattr(logprobs, "_BLOCK_NUMBERS", 120)
        assert all(map(torch.equal, check(logits, token_ids, 4), whole))
