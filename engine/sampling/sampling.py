"""The sampler: the token at a position is the argmax of its processed logits plus Gumbel noise.

    processed = processors(raw logits, history, grammar)            processors.py
    score     = processed                                           greedy rows
    score     = filters((processed - max) / temperature) + noise    the others: filters.py, noise.py
    token     = argmax(score), the lowest id of equals        (files of kernels/sampling/)

The noise is a pure function of (seed, absolute position, token id) and every step treats a row by itself, exactly. So
the same logits give the same token alone, in any batch, after a preemption, and on another node.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...kernels.sampling import sample as choice
from ...kernels.sampling.processors import History, TokenColumns, process_logits
from ...kernels.sampling.sample import perturbed_argmax
from ...metadata.wire.request import TokenLogprobs
from ..device import counted, recorded_event, to_host
from .batch import SamplingBatch
from .logprobs import Logprobs, compute_logprobs


class SampleResult(NamedTuple):
    """One token for each row of the batch."""

    token_ids: Tensor  # [num_rows] int64
    is_valid: Tensor  # [num_rows] bool; False: the row's logits are not numbers, and its token is no choice
    logprobs: Logprobs | None  # None when no row asks


class SubmittedSample(NamedTuple):
    """Tokens that the device samples before anything that is submitted to it later."""

    token_ids: Tensor  # [num_rows] int64, on the device; no choice if the logits are not numbers
    numbers: Tensor  # [2, num_rows] int64, `token_ids` and whether they are valid, on the host after `event`
    logprobs: Logprobs | None  # on the host after `event`
    event: torch.cuda.Event | None  # None if the device is the host

    @classmethod
    def of(cls, logits: Tensor, batch: SamplingBatch) -> Self:
        """Submit what `sample` computes, and the copies of its results to the host."""
        result = sample(logits, batch)
        numbers = to_host(torch.stack([result.token_ids, result.is_valid.long()]))
        logprobs = None if result.logprobs is None else result.logprobs.to_host()
        return cls(result.token_ids, numbers, logprobs, recorded_event(logits.device))

    def read(self, num_logprobs: Sequence[int | None]) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """Wait for the results. Return one token for each row, None if its logits are not numbers, and what
        `Logprobs.to_rows` returns for the log-probabilities that rows ask for."""
        if self.event is not None:
            self.event.synchronize()
        ids = [token if is_valid else None for token, is_valid in self.numbers.t().tolist()]
        return ids, [None] * len(ids) if self.logprobs is None else self.logprobs.to_rows(num_logprobs)


def sample(logits: Tensor, batch: SamplingBatch, *, with_logprobs: bool = True) -> SampleResult:
    """Sample one token per row; `logits` is left as it was.

    Args:
        logits: [num_rows, num_logits] float32, bfloat16 or float16; rows as in `batch`, or this rank's alone, if ranks
            divide them (`SamplingBatch.lens`). Then all ranks must call this, without log-probabilities.
        batch: see `SamplingBatch.of`.
        with_logprobs: False for drafts, because no client reads their log-probabilities.
    """
    if len(logits) < batch.num_rows:
        assert not with_logprobs, "log-probabilities are of all rows"
        packed = over_rows(logits, batch, lambda own: _packed(sample(logits, own, with_logprobs=False)))
        return SampleResult(packed >> 1, (packed & 1).bool(), None)
    token_ids, is_valid = perturbed_argmax(processed(logits, batch), batch.draws, batch.logit_ids)
    logprobs, num_logprobs = None, batch.needs.num_logprobs
    if num_logprobs is not None and with_logprobs:
        assert batch.logit_ids is None, "log-probabilities are of the whole vocabulary"
        logprobs = compute_logprobs(logits, token_ids, num_logprobs)
    return SampleResult(token_ids, is_valid, logprobs)


def over_rows(logits: Tensor, batch: SamplingBatch, draw: Callable[[SamplingBatch], Tensor]) -> Tensor:
    """Return what `draw` returns for the rows of each rank, [num_rows, ...]. `logits` are those of this rank's rows, of
    which `draw` gets the batch. All ranks must call it."""
    shares, lens = batch.shares, batch.lens(batch.num_rows)
    assert shares is not None and lens is not None and len(logits) == lens[shares.group.rank], (len(logits), lens)
    return shares.gather(draw(batch.part(shares.own(lens))), lens)


def _packed(result: SampleResult) -> Tensor:
    """Return tokens and whether they are valid as one number each, [num_rows] int64."""
    return result.token_ids * 2 + result.is_valid


def processed(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the processed logits [num_rows, num_logits]: `logits` itself if no row changes them, else float32."""
    history = batch.history
    if history is None:
        if batch.allowed is None:
            return logits
        history = History.of(TokenColumns(), counted(batch.num_rows, logits.device))
    return process_logits(logits, history, batch.penalties, batch.bans_now, batch.logit_ids, batch.allowed)


def perturbed_scores(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the scores whose argmax `sample` takes, a new [num_rows, num_logits] float32; -inf: excluded."""
    scores, draws = processed(logits, batch), batch.draws
    if draws is None:
        return scores.to(torch.float32, copy=True)
    return choice.perturbed_scores(scores, draws, batch.logit_ids)


def tie_gap(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the difference of each row's two best scores, [num_rows] float32; inf if only one token may be drawn.

    The unit is that of the processed logits for greedy rows, and of logits / temperature for the others. Below the
    bound of promise P1, another order of summation may choose the other token.
    """
    best = perturbed_scores(logits, batch).topk(2).values
    return best[:, 0] - best[:, 1]
