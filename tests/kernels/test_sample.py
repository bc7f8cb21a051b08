"""The choice of tokens, by each backend that runs here, against scores that are computed here."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, random

from baton.kernels.noise import gumbel_noise_ref
from baton.kernels.operations import preferring
from baton.kernels.sample import Draws, perturbed_argmax, perturbed_topk

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("vocab_size", [1, 7, 1025, 3000])
@pytest.mark.parametrize("is_random", [False, True], ids=["greedy", "random"])
def test_tokens(kind: str, vocab_size: int, is_random: bool) -> None:
    """Rows of temperature 0 among others; the last has a NaN."""
    logits = random(4, vocab_size, scale=3.0)
    logits[3, vocab_size // 2] = float("nan")
    seeds, positions = torch.arange(4, device=DEVICE) * 7, torch.arange(4, device=DEVICE) + 3
    temperatures = torch.tensor([0.0, 0.7, 1.0, 1.0], device=DEVICE)
    draws = Draws(seeds, positions, temperatures) if is_random else None
    of_three = None if draws is None else Draws(*(column[:3] for column in draws[:3]))
    scores = logits.clone()
    if is_random:
        noised = (logits - logits.amax(1, keepdim=True)) / temperatures.unsqueeze(1)
        scores[1:] = (noised + gumbel_noise_ref(seeds, positions, vocab_size))[1:]
    k = min(3, vocab_size)
    with preferring(kind):  # type: ignore[arg-type]
        token_ids, is_valid = perturbed_argmax(logits, draws)
        best, log_softmax = perturbed_topk(logits[:3], k, of_three)
    assert torch.equal(token_ids[:3], scores[:3].argmax(1)) and is_valid.tolist() == [True, True, True, False]
    assert torch.equal(best, scores[:3].topk(k).indices)
    torch.testing.assert_close(log_softmax, scores[:3].log_softmax(1).gather(1, best), atol=1e-5, rtol=1e-5)


def test_more_than_a_kernel_finds() -> None:
    logits = random(2, 100)
    with preferring("triton"):
        assert torch.equal(perturbed_topk(logits, 40)[0], logits.topk(40).indices)
