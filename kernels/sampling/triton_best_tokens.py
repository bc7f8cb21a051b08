"""The operations of best_tokens.py on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .sample import Choice
from .triton_packed import part_maxima
from .triton_sample import choose


def best_of_share(logits: Tensor, first_id: int, num_ids: int) -> Tensor:
    """Return `best_of_share_ref`, with a packed number of each part of a row."""
    return part_maxima(logits, first_id=first_id, num_ids=num_ids)


def best_of_all(packed: Tensor) -> Choice:
    """Return `best_of_all_ref`."""
    assert packed.dtype == torch.int64 and packed.is_contiguous(), (packed.shape, packed.dtype, packed.stride())
    return choose(packed, packed)
