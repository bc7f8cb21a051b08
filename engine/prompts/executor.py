"""The executor of a prefill node, as the node sees it: work goes in, reports come out. Without torch.

    PrefillNode --Chunk, Forget--> PromptExecutor --Scores, FirstTokens, HandoffRows--> PrefillNode

prompts.py has the executor for this process's device, ranks/executor.py that for several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..progress import Progress
from ..work import Chunk, FirstTokens, HandoffRows, Scores


class BegunTails(Protocol):
    """The sampling and the drafting after prompts that end in one chunk, under way or done (prompts.py)."""

    def draft(self) -> None:
        """Submit the drafter's work after the first tokens. A second call does nothing."""
        ...

    def first_tokens(self) -> list[FirstTokens]:
        """Wait for the first tokens and return them, prompt by prompt."""
        ...

    def wait_rows(self) -> list[HandoffRows]:
        """Wait for the drafts, which were submitted, and return the metadata rows, prompt by prompt."""
        ...


class BegunChunk(Protocol):
    """A chunk that a device computes or has computed (prompts.py)."""

    @property
    def tails(self) -> Sequence[BegunTails]: ...

    @property
    def is_done(self) -> bool:
        """Whether a device reports that it has computed everything. Always False on a CPU."""
        ...

    @property
    def is_computed(self) -> bool:
        """Whether the chunk's KV is computed, so that `wait` returns at once."""
        ...

    def wait(self) -> Scores:
        """Wait until the chunk's KV is computed, and report it."""
        ...

    def draft(self) -> None:
        """Submit the drafter's work after the first tokens, too."""
        ...


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

    def forget(self, key: int) -> None:
        """Free what is kept of a prompt, if there is anything."""
        ...

    def expect(self, grammar: str) -> None:
        """Prepare for a request with this grammar, without waiting."""
        ...

    def submit(self, chunk: Chunk) -> BegunChunk:
        """Submit a chunk and the sampling of the prompts that end in it. Raises OutOfMemory if the device has no memory
        for it. Then nothing of the chunk can be read, and its pages hold no defined KV beyond the tokens of earlier
        chunks. Its prompts may be submitted again from there."""
        ...
