"""Choice of the token with the largest logit, if several ranks hold parts of a row of logits.

    best_of_share   each rank: the best logits of its share, packed with their ids
    best_of_all     each rank: the token of a row, given the packed numbers of all ranks

A packed number is an int64 whose order is that of (logit, then lower id): the key of the float32 logit above 32 bits of
the inverted id. NaN is above all logits, as in torch's argmax, and 0 equals -0. So the token is that of
`perturbed_argmax` over the whole row, whatever the shares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operations import Operation
from .sample import Choice

_LOWEST = -(2**63)  # below every packed logit
_NAN_KEY = 2**31 - 1
_MOST_IDS = 2**31 - 1


def best_of_share_ref(logits: Tensor, first_id: int, num_ids: int) -> Tensor:
    """Return the best logits of parts of each row, packed: [num_rows, num_parts] int64, by the width of `logits` alone.

    Args:
        logits: [num_rows, width] float32, bfloat16 or float16, rows contiguous.
        first_id: the token of the first logit.
        num_ids: logits of a row that are of tokens; those behind them do not count. May be 0.
    """
    if not num_ids:
        return torch.full((len(logits), 1), _LOWEST, dtype=torch.int64, device=logits.device)
    scores = logits[:, :num_ids].float() + 0.0  # -0 becomes 0
    bits = scores.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ _NAN_KEY, bits).masked_fill_(scores.isnan(), _NAN_KEY).long()
    ids = torch.arange(first_id, first_id + num_ids, device=logits.device)
    return (keys * 2**32 + (_MOST_IDS - ids)).amax(1, keepdim=True)


def best_of_all_ref(packed: Tensor) -> Choice:
    """Return the token of each row, given all that `best_of_share` returned for it: [num_rows, num_packed] int64."""
    best = packed.amax(1)
    return Choice(_MOST_IDS - (best & _MOST_IDS), (best >> 32) != _NAN_KEY)


best_of_share = Operation("best_of_share", best_of_share_ref)
best_of_all = Operation("best_of_all", best_of_all_ref)
