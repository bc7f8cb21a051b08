"""One unit of work on a decode node, from its reservation to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine.engine import Engine
from ..engine.prefix_cache import Lease
from ..engine.sampling_state import SamplingState
from ..engine.slots import MAX_MISSED
from ..metadata.wire.messages import Dispatch
from ..metadata.wire.request import Ended, GenerationRequest, TokenLogprobs, Unit
from .run_clock import RunClock


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
    slot: int | None = None  # of the rounds' state, from its admission on
    num_missed: int = 0  # rows that the drafter has not seen
    num_coming: int = 0  # the most tokens that the round under way may bring; 0: it is in none
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    ended: Ended | None = None
    clock: RunClock = field(default_factory=RunClock)

    @property
    def salt(self) -> str:
        return self.request.cache_salt

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_left_behind(self) -> bool:
        """The drafter lacks too many rows: it is not speculated any more."""
        return self.num_missed > MAX_MISSED

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


def new_sequence(message: Dispatch, choice: int, order: int, engine: Engine) -> Sequence:
    """A choice that was asked for, without pages yet. Raises RequestError for ids that the model does not have."""
    request = message.request
    prompt_ids, received_ids = request.token_ids(engine.model_config.vocab_size, engine.context_len)
    sampling = SamplingState(
        request.params,
        prompt_ids,
        received_ids,
        vocab_size=engine.model_config.vocab_size,
        choice=choice,
        device=engine.device,
    )
    return Sequence(
        unit=Unit(message.rid, choice, message.attempt),
        order=order,
        request=request,
        prompt_len=len(prompt_ids),
        token_ids=prompt_ids + received_ids,
        sampling=sampling,
        pages=[],
        lease=None,
        num_sent=len(received_ids),
    )
