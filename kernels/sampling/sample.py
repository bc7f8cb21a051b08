"""The choice of tokens: argmax or top-k of logits plus Gumbel noise (noise.py).

    score = logits                                                greedy rows, temperature 0
    score = (logits - max) / temperature + noise                  the others; -inf for ids that filters.py excludes
    token = argmax(score), the lowest id of equals

engine/sampling/sampling.py applies the processors of logits before.

Logits may be of some tokens alone, as those of a draft head with a reduced vocabulary. `logit_ids` then holds the token
id of each logit, ascending, [num_logits] int32. The result is the same as with -inf for every other token: a token has
the noise of its own id, and the lowest index of equals is the lowest id. None: logit i is of token i.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..operations import Operation
from .filters import Filters, keep_likely
from .noise import add_gumbel_noise_, check_token_ids


class Draws(NamedTuple):
    """How rows are drawn, each column contiguous."""

    seeds: Tensor  # [num_rows] int64, as for `gumbel_noise_ref`
    positions: Tensor  # [num_rows] int64, likewise
    temperatures: Tensor  # [num_rows] float32, 0: greedy
    filters: Filters | None = None  # of the rows that are not greedy; None: no row has any


class Choice(NamedTuple):
    """One token for each row."""

    token_ids: Tensor  # [num_rows] int64
    is_valid: Tensor  # [num_rows] bool; False: a logit of the row is NaN, and the token is no choice


def perturbed_argmax_ref(logits: Tensor, draws: Draws | None = None, logit_ids: Tensor | None = None) -> Choice:
    """Return the token of each row, the lowest id of equal scores.

    Args:
        logits: [num_rows, num_logits] float32, bfloat16 or float16, rows contiguous; left as it was.
        draws: None: all rows are greedy.
        logit_ids: see above.
    """
    if logit_ids is not None:
        check_token_ids(logits, logit_ids)
    if draws is None:
        index = logits.argmax(-1)  # promises the first of equals
        found = logits.gather(1, index.unsqueeze(1)).squeeze(1)  # argmax finds a NaN first
        return Choice(_ids_at(index, logit_ids), found.isnan().logical_not_())
    index = perturbed_scores(logits, draws, logit_ids).argmax(-1)
    return Choice(_ids_at(index, logit_ids), logits.isnan().any(1).logical_not_())


def perturbed_topk_ref(
    logits: Tensor, k: int, draws: Draws | None = None, logit_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the `k` best ids of each row, best first, and log-softmax of all scores at them: [num_rows, k] int64,
    float32.

    Arguments are as for `perturbed_argmax_ref`; `k` is at most the number of logits. If filters leave fewer ids, the
    others are any that have a logit, with -inf."""
    if logit_ids is not None:
        check_token_ids(logits, logit_ids)
    scores = logits.float() if draws is None else perturbed_scores(logits, draws, logit_ids)
    best, index = scores.topk(k)
    return _ids_at(index, logit_ids), best - scores.logsumexp(1, keepdim=True)


perturbed_argmax = Operation("perturbed_argmax", perturbed_argmax_ref)
perturbed_topk = Operation("perturbed_topk", perturbed_topk_ref)


def perturbed_scores(logits: Tensor, draws: Draws, logit_ids: Tensor | None = None) -> Tensor:
    """Return the scores, [num_rows, num_logits] float32, a new tensor. Arguments are as for `perturbed_argmax_ref`."""
    scores, temperatures = logits.to(torch.float32), draws.temperatures.unsqueeze(1)
    is_greedy = temperatures == 0
    perturbed = scores - scores.amax(1, keepdim=True)  # at most 0: no temperature overflows
    perturbed.div_(temperatures.masked_fill(is_greedy, 1.0))
    if draws.filters is not None:
        keep_likely(perturbed, draws.filters)
    add_gumbel_noise_(perturbed, draws.seeds, draws.positions, logit_ids)
    return torch.where(is_greedy, scores, perturbed)


def _ids_at(index: Tensor, logit_ids: Tensor | None) -> Tensor:
    """Return the token ids of the logits `index` int64, of its shape and dtype."""
    return index if logit_ids is None else logit_ids[index].to(torch.int64)
