"""The executor of a prefill node, as the node sees it: work goes in, reports come out. Without torch.

    PrefillNode --Chunk, Forget--> PromptExecutor --Scores, FirstTokens, HandoffRows--> PrefillNode

prompts.py has the executor for this process's device, rank_executor.py that for several ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .progress import Progress
from .work import Chunk

if TYPE_CHECKING:
    from .prompts import SubmittedChunk


class PromptExecutor(Protocol):
    """Computes chunks of prompts in the order of submission. One thread."""

    @property
    def context_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_chunk(self) -> tuple[int, float] | None:
        """Tokens and seconds of the longest chunk, as the start measured them; None: it did not."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works while the host goes on, so that the next chunk is submitted meanwhile."""
        ...

    @property
    def keys(self) -> frozenset[int]:
        """Keys of the prompts of which states are kept."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Capture graphs before service. `progress` counts them."""
        ...

    def submit(self, chunk: Chunk) -> SubmittedChunk:
        """Submit a chunk and the sampling of the prompts that end in it. Raises OutOfMemory if the device has no memory
        for it. Then nothing of the chunk can be read, and its pages hold no defined KV beyond the tokens of earlier
        chunks. Its prompts may be submitted again from there."""
        ...

    def forget(self, key: int) -> None:
        """Free what is kept of a prompt, if there is anything."""
        ...
