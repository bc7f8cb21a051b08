"""Records of what the indexers of this process pick, in the form in which `Reference.all_logits` takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F

from baton.engine.attention import picked
from baton.engine.layers import compressed_attention


class PickRecord:
    """The picks of one sequence's forwards on the CPU, chunk after chunk."""

    def __init__(self) -> None:
        self._calls: list[torch.Tensor] = []

    def pick(self, scores: torch.Tensor, num_picks: int) -> torch.Tensor:
        picks = _pick(scores, num_picks)
        self._calls.append(picks)
        return picks

    def of_layers(self, num_indexers: int) -> list[torch.Tensor]:
        """Return the picks of each indexer, [num_tokens, num_picks] int32, -1 behind the last."""
        width = max((each.shape[1] for each in self._calls), default=0)
        padded = [F.pad(each, (0, width - each.shape[1]), value=-1) for each in self._calls]
        return [torch.cat(padded[i::num_indexers]) for i in range(num_indexers)]


@contextmanager
def recorded_picks() -> Iterator[PickRecord]:
    """Record the picks of all forwards of this process."""
    record = PickRecord()
    with (
        mock.patch.object(picked, "pick", record.pick),
        mock.patch.object(compressed_attention, "pick", record.pick),
    ):
        yield record


_pick = picked.pick
