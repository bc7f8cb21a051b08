"""One unit of work on a decode node, from its reservation to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine.drafters.base import DraftState
from ..engine.prefix_cache import Lease
from ..engine.sampling_state import SamplingState
from ..metadata.request import Ended, GenerationRequest, TokenLogprobs, Unit


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, pages and sampling state of one unit. Pages beyond `lease` are its own (owner: request)."""

    unit: Unit
    order: int  # age: the smaller, the older; the youngest is preempted first
    request: GenerationRequest
    prompt_len: int
    token_ids: list[int]  # prompt, received and generated ones
    sampling: SamplingState
    pages: list[int]  # the block table
    lease: Lease | None
    num_computed: int = 0  # tokens with KV in `pages`
    num_cached: int = 0  # as prefill counted them
    num_sent: int = 0  # generated tokens already sent to the router
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index among the generated tokens
    draft: DraftState | None = None
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    ended: Ended | None = None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_to_compute(self) -> int:
        """Tokens without KV: one while decoding, more after a preemption."""
        return len(self.token_ids) - self.num_computed

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Record a generated token."""
        if logprobs is not None:
            self.logprobs[self.num_generated] = logprobs
        self.token_ids.append(token_id)
        self.sampling.append(token_id)
