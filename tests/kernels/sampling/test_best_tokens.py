"""Shares of a row's logits give the token of the whole row, by each backend that runs here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, random

from baton.kernels.operations import preferring
from baton.kernels.sampling.best_tokens import best_of_all, best_of_share, best_of_share_ref
from baton.kernels.sampling.sample import Choice, perturbed_argmax_ref

pytest.importorskip("triton")

from baton.kernels.sampling import triton_sample

INF, NAN = float("inf"), float("nan")


def chosen(logits: Tensor, width: int) -> Choice:
    """Return the tokens that ranks choose whose shares have `width` logits each, with large numbers behind the last
    one's tokens."""
    vocab_size, found = logits.shape[1], []
    for first_id in range(0, vocab_size + width, width):  # one more rank than tokens need
        num_ids = min(width, max(0, vocab_size - first_id))
        share = torch.full((len(logits), width), 1e4, dtype=logits.dtype, device=logits.device)
        share[:, :num_ids] = logits[:, first_id : first_id + num_ids]
        found.append(best_of_share(share, first_id, num_ids))
    assert len({each.shape for each in found}) == 1
    return best_of_all(torch.cat(found, 1))


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "width"), [(40, 16), (2100, 1040), (7, 16)])
def test_shares_choose_the_token_of_the_whole_row(kind: str, dtype: torch.dtype, vocab_size: int, width: int) -> None:
    logits = random(7, vocab_size, scale=3.0).to(dtype)
    logits[1] = -logits[1].abs() - 1  # all below the zeros of padding
    logits[2] = 1.0  # all equal
    logits[3], logits[3, 4], logits[3, -1] = -1.0, -0.0, 0.0  # equal, too
    logits[4, 5], logits[4, -2] = INF, INF
    logits[5, 3], logits[5, -1] = NAN, INF
    logits[6] = -INF
    with preferring(kind):  # type: ignore[arg-type]
        ours, theirs = chosen(logits, width), perturbed_argmax_ref(logits)
    assert ours.is_valid.tolist() == theirs.is_valid.tolist() == [True] * 5 + [False, True]
    assert ours.token_ids.tolist() == theirs.token_ids.tolist() and ours.token_ids.dtype == torch.int64


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_no_rows(kind: str) -> None:
    with preferring(kind):  # type: ignore[arg-type]
        found = chosen(torch.zeros(0, 40, device=DEVICE), 16)
    assert found.token_ids.shape == found.is_valid.shape == (0,)


@pytest.mark.parametrize("num_ids", [0, 1, 1024, 1500, 2064])
def test_shares_of_one_width_have_as_many_numbers_whatever_tokens_they_have(num_ids: int) -> None:
    """The ranks gather them side by side. Their largest number is that of the specification, bit for bit."""
    logits = random(3, 2064)
    packed = triton_sample.best_of_share(logits, 4128, num_ids)
    assert packed.shape == (3, 3) and packed.dtype == torch.int64 and packed.device.type == DEVICE
    assert torch.equal(packed.amax(1, keepdim=True), best_of_share_ref(logits, 4128, num_ids))
