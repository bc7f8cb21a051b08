"""Log-probabilities under the target's own distribution: log-softmax of the raw logits, before any processing."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..metadata.wire.request import MAX_TOP_LOGPROBS, TokenLogprobs
from .copies import to_host


class Logprobs(NamedTuple):
    """Log-probabilities of rows, on the logits' device until they are brought to the host."""

    chosen: Tensor  # [num_rows] float32
    top_ids: Tensor  # [num_rows, num_top] int64, likeliest first, equal ones by ascending id
    top_logprobs: Tensor  # [num_rows, num_top] float32

    def to_host(self) -> Self:
        """Copies, there after the next `recorded_event` (copies.py)."""
        return type(self)(*map(to_host, self))

    def to_rows(self, num_logprobs: Sequence[int | None]) -> list[TokenLogprobs | None]:
        """Copy to the host what each row asks for: None nothing, 0 the token's own, k the top k too."""
        assert len(num_logprobs) == self.chosen.shape[0], (len(num_logprobs), self.chosen.shape)
        chosen, ids, values = self.chosen.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist()
        return [
            None if num is None else TokenLogprobs(chosen[row], tuple(ids[row][:num]), tuple(values[row][:num]))
            for row, num in enumerate(num_logprobs)
        ]


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `token_ids` and of the `num_top` likeliest tokens (at most 20, and at most all).

    Args:
        logits: [num_rows, vocab_size], any float dtype, unprocessed.
        token_ids: [num_rows] int64, the sampled tokens (or, for a prompt, its next tokens).
    """
    assert logits.shape[0] == token_ids.shape[0], (logits.shape, token_ids.shape)
    assert 0 <= num_top <= MAX_TOP_LOGPROBS, num_top
    logprobs = logits.to(torch.float32).log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    ids = logprobs.topk(min(num_top, logits.shape[1])).indices.sort(1).values
    values, order = logprobs.gather(1, ids).sort(stable=True, dim=1, descending=True)
    return Logprobs(chosen, ids.gather(1, order), values)
