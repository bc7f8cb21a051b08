"""Log-probabilities under the target's own distribution: log-softmax of the raw logits, before any processing."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from torch import Tensor

from ...kernels.sampling.logprobs import top_logprobs
from ...metadata.wire.request import MAX_TOP_LOGPROBS, TokenLogprobs
from ..device import to_host


class Logprobs(NamedTuple):
    """Log-probabilities of rows, on the logits' device until they are brought to the host."""

    chosen: Tensor  # as TopLogprobs
    top_ids: Tensor
    top_logprobs: Tensor

    def to_host(self) -> Self:
        """Copies, there after the next `recorded_event` (device.py)."""
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
    """Return the log-probabilities of `token_ids` and of the `num_top` likeliest tokens (at most 20, and at most all).

    Args:
        logits: [num_rows, vocab_size], any float dtype, unprocessed.
        token_ids: [num_rows] int64, the sampled tokens (or, for a prompt, its next tokens).
    """
    assert 0 <= num_top <= MAX_TOP_LOGPROBS, num_top
    return Logprobs(*top_logprobs(logits, token_ids, min(num_top, logits.shape[1])))
