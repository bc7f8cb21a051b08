"""Work: what a scheduler asks a device to do. Reports: what comes back. Plain values without torch.

    scheduler --Work--> Executor --Report--> scheduler

A scheduler makes work of token ids, page numbers and slots. The executor of each rank does the same work on its own
device. What lies on a device between two works (slots, states of prompts) is named by numbers that the scheduler
chooses. Host decisions, such as the length of drafts, are made before the work is built and are named in it.

    work        does                                                        report
    Chunk       computes prompt tokens, and their log-probabilities         Scores
    Tails       samples first tokens, and drafts after them                 FirstTokens, then Tails' drafts
    LoadSlot    gives a slot to a sequence                                  -
    CatchUp     lets the drafter see rows that rounds left out              -
    Round       drafts, verifies, accepts                                   Tokens
    CopyPages   copies pages within every pool                              -
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchRow:
    """New tokens of one sequence of a forward.

    `pages` must cover position + len(input_ids) tokens; more is fine. Logits are wanted for the last `num_logits` of
    the new tokens.
    """

    input_ids: Sequence[int]
    position: int  # of the first new token: as many tokens have KV in the pages
    pages: Sequence[int]
    num_logits: int = 1
