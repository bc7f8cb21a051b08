"""Log-probabilities of a prompt's own tokens: the state of each position scores the token that follows it.

forward over rows --states--> SubmittedScores --read--> log-probabilities of each row's scored tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...metadata.wire.request import TokenLogprobs
from ..device import to_device
from ..engine import Engine
from ..sampling.logprobs import Logprobs
from ..work import BatchRow


class SubmittedScores(NamedTuple):
    """Log-probabilities of the scored tokens of rows, which the device computes or has computed."""

    rows: Sequence[BatchRow]
    num_logprobs: Sequence[int]  # of each row: likeliest tokens that are reported with each score
    logprobs: Sequence[Logprobs | None]  # of each row; None: it has no scored token

    @classmethod
    def of(
        cls,
        engine: Engine,
        rows: Sequence[BatchRow],
        token_ids: Sequence[Sequence[int]],
        num_logprobs: Sequence[int],
        final: Tensor | None,
    ) -> Self:
        """Submit the log-probabilities of the tokens that each row scores.

        Args:
            token_ids: of each row, the whole prompt.
            num_logprobs: of each row.
            final: states of all rows after the final norm, [num_tokens, hidden_size]. None: no token is scored.
        """
        logprobs: list[Logprobs | None] = []
        start = 0
        for row, prompt, num_top in zip(rows, token_ids, num_logprobs, strict=True):
            num_scored, first = row.num_scored, row.position + 1
            if num_scored:
                assert final is not None, "states of scored tokens were not kept"
                ids = to_device(torch.tensor(prompt[first : first + num_scored]), final.device)
                logprobs.append(engine.score(final[start : start + num_scored], ids, num_top))
            else:
                logprobs.append(None)
            start += len(row.input_ids)
        return cls(rows, num_logprobs, logprobs)

    def read(self) -> list[list[TokenLogprobs]]:
        """Return the log-probabilities of each row's scored tokens. The next `recorded_event` after `of` has
        happened."""
        own = zip(self.rows, self.num_logprobs, self.logprobs, strict=True)
        return [_read(row.num_scored, num_top, scored) for row, num_top, scored in own]


def _read(num_scored: int, num_top: int, scored: Logprobs | None) -> list[TokenLogprobs]:
    if scored is None:
        return []
    return [entry for entry in scored.to_rows([num_top] * num_scored) if entry is not None]
