"""Log-probabilities under the target's own distribution: log-softmax of the raw logits, before any processing."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..metadata.request import MAX_TOP_LOGPROBS, TokenLogprobs


class Logprobs(NamedTuple):
    """Log-probabilities of the rows that asked for them, still on the logits' device."""

    rows: tuple[int, ...]  # their indices in the batch
    num_tops: tuple[int, ...]  # how many top tokens each asked for
    chosen: Tensor  # [num_asking] float32
    top_ids: Tensor  # [num_asking, max(num_tops)] int64, likeliest first, equal ones by ascending id
    top_logprobs: Tensor  # [num_asking, max(num_tops)] float32

    def to_rows(self, num_rows: int) -> list[TokenLogprobs | None]:
        """Copy to the host: one entry for each row of the batch, None for those that did not ask."""
        result: list[TokenLogprobs | None] = [None] * num_rows
        chosen, ids, values = self.chosen.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist()
        for i, (row, num) in enumerate(zip(self.rows, self.num_tops, strict=True)):
            result[row] = TokenLogprobs(chosen[i], tuple(ids[i][:num]), tuple(values[i][:num]))
        return result


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_logprobs: Sequence[int | None]) -> Logprobs | None:
    """Log-probabilities of `token_ids` and of the likeliest tokens.

    Args:
        logits: [num_rows, vocab_size], any float dtype, unprocessed.
        token_ids: [num_rows] int64, the sampled tokens (or, for a prompt, its next tokens).
        num_logprobs: one a row: None for nothing, 0 for the token's own, k for the top k too (at most 20).

    Returns: None when no row asks.
    """
    rows = tuple(row for row, num in enumerate(num_logprobs) if num is not None)
    if not rows:
        return None
    assert logits.shape[0] == token_ids.shape[0] == len(num_logprobs), (logits.shape, token_ids.shape)
    nums = tuple(num_logprobs[row] or 0 for row in rows)
    assert max(nums) <= MAX_TOP_LOGPROBS, nums
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    logprobs = logits.index_select(0, index).to(torch.float32).log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.index_select(0, index)[:, None]).squeeze(1)
    ids = logprobs.topk(min(max(nums), logits.shape[1])).indices.sort(1).values
    values, order = logprobs.gather(1, ids).sort(stable=True, dim=1, descending=True)
    return Logprobs(rows, nums, chosen, ids.gather(1, order), values)
