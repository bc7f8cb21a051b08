"""The choice of tokens, by each backend that runs here, against scores that are computed here."""

from __future__ import annotations

import itertools

import pytest
import torch
from heads import over_all_tokens, some_ids
from thinned import pairs, thinned
from triton_device import DEVICE, random

from baton.kernels.operations import preferring
from baton.kernels.sampling.filters import Filters
from baton.kernels.sampling.noise import gumbel_noise_ref
from baton.kernels.sampling.sample import Draws, perturbed_argmax, perturbed_topk

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


INF = float("inf")
FILTERS = Filters(
    torch.tensor([-INF, -INF, -3.0, -6.0, -INF, -INF], device=DEVICE),
    torch.tensor([4, 3, 2**31 - 1, 40, 2**31 - 1, 600], device=DEVICE),  # the last ones are more than some vocabularies
    torch.tensor([1.0, 0.5, 1.0, 0.9, 0.6, 0.99], dtype=torch.float64, device=DEVICE),
)
KINDS_OF_DRAWS = {
    "greedy": None,
    "plain": (),
    "min_p": (FILTERS._replace(top_k=None, top_p=None),),
    "filters": (FILTERS,),
}


SIZES = [(1, 900), (37, 300), (1025, 2500), (700, 700)]
SLOW = {("triton", "filters", num) for num in (1, 700, 1025)}  # test_triton_sample.py has more of these


CELLS = [
    (kind, how, *sizes)
    for kind, how, sizes in itertools.product(("reference", "numba", "triton"), KINDS_OF_DRAWS, SIZES)
    if (kind, how, sizes[0]) not in SLOW
]
MEETINGS = pairs([cell[:3] for cell in CELLS])


@pytest.mark.parametrize(
    ("kind", "how", "num_logits", "vocab_size"),
    thinned(CELLS, lambda i, *_: i in MEETINGS),
)
def test_logits_of_some_tokens_give_what_minus_infinity_for_all_others_gives(
    kind: str, how: str, num_logits: int, vocab_size: int
) -> None:
    """Also with equal logits, of which the lowest id wins."""
    logit_ids, given = some_ids(num_logits, vocab_size).to(DEVICE), KINDS_OF_DRAWS[how]
    seeds, positions = torch.arange(6, device=DEVICE) * 7919, torch.arange(6, device=DEVICE) + 3
    temperatures = torch.tensor([0.7, 0.0, 1.0, 1.3, 1.0, 1.0], device=DEVICE)
    draws = None if given is None else Draws(seeds, positions, temperatures, *given)
    logits = random(6, num_logits, scale=2.0, seed=num_logits)
    coarse = logits.mul(2).round().div(2).to(torch.bfloat16)
    k = min(4, num_logits)
    with preferring(kind):  # type: ignore[arg-type]
        for each in (logits, coarse):
            ours = perturbed_argmax(each, draws, logit_ids)
            theirs = perturbed_argmax(over_all_tokens(each, logit_ids, vocab_size), draws)
            assert ours.token_ids.dtype is torch.int64 and torch.equal(ours.token_ids, theirs.token_ids)
            assert torch.equal(ours.is_valid, theirs.is_valid)
        ids, log_softmax = perturbed_topk(logits, k, draws, logit_ids)
        all_ids, all_log_softmax = perturbed_topk(over_all_tokens(logits, logit_ids, vocab_size), k, draws)
    is_left = all_log_softmax > -INF  # the others are any
    assert ids.dtype is torch.int64 and torch.equal(ids[is_left], all_ids[is_left])
    assert torch.equal(log_softmax > -INF, is_left) and torch.isin(ids, logit_ids).all()
    torch.testing.assert_close(log_softmax, all_log_softmax, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud
@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("is_random", [False, True], ids=["greedy", "random"])
def test_what_is_no_number_is_found_among_some_tokens(kind: str, is_random: bool) -> None:
    logit_ids, logits = some_ids(40, 100).to(DEVICE), random(3, 40)
    logits[1, 20], logits[2, :] = float("nan"), -INF
    column = torch.ones(3, dtype=torch.int64, device=DEVICE)
    draws = Draws(column, column, torch.ones(3, device=DEVICE)) if is_random else None
    with preferring(kind):  # type: ignore[arg-type]
        token_ids, is_valid = perturbed_argmax(logits, draws, logit_ids)
    assert is_valid.tolist() == [True, False, True] and torch.isin(token_ids, logit_ids).all()


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("wrong", [torch.arange(8), torch.arange(9, dtype=torch.int32)], ids=["int64", "too many"])
def test_other_ids_are_refused(kind: str, wrong: torch.Tensor) -> None:
    with preferring(kind), pytest.raises(AssertionError):  # type: ignore[arg-type]
        perturbed_argmax(random(2, 8), None, wrong.to(DEVICE))
