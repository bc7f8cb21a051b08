"""State of sampling for one choice of a request: parameters, seed, position and token history, without torch.

A `SamplingState` is a pure function of (parameters, choice, prompt ids, output ids): one built anew after a preemption
or on another node equals one that was advanced token by token. Those who sample make tensors of it: sampling/batch.py
for a batch of states, slots.py for the slot of a running sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from ...metadata.wire.request import MAX_TOP_LOGPROBS, Ended, SamplingParams, choice_seed

MIN_TEMPERATURE = 1e-6  # below it a request is greedy


class Needs(NamedTuple):
    """Steps of sampling that a row asks for, or any row of a batch. The host knows them, and skips all others."""

    is_random: bool = False  # a temperature, so noise
    ranks: bool = False  # top-k or top-p
    cuts: bool = False  # min-p
    penalizes: bool = False
    biases: bool = False
    bans: bool = False  # stop tokens, until min_tokens are there
    masks: bool = False  # a grammar
    num_logprobs: int | None = None

    @classmethod
    def any_of(cls, rows: Iterable[Self]) -> Self:
        """Return the needs of all `rows` together, with the largest number of log-probabilities."""
        columns = list(zip(*set(rows), strict=True))
        if not columns:
            return cls()
        *flags, nums = columns
        most = max((num for num in nums if num is not None), default=None)
        return cls(*map(any, flags), num_logprobs=most)

    @property
    def processes(self) -> bool:
        """Whether columns of the vocabulary change logits before temperature."""
        return self.penalizes or self.biases or self.bans

    @property
    def is_plain_greedy(self) -> bool:
        """Whether one argmax of the raw logits samples every row."""
        return not (self.is_random or self.processes or self.masks)

    @property
    def of_drafts(self) -> Self:
        """The needs of drafts, which no grammar binds: those that it forbids are not accepted."""
        return self._replace(masks=False)


GREEDY = Needs()
SAMPLED = Needs(is_random=True, ranks=True, cuts=True)  # rows without filters leave its kernels at once
SCORED = SAMPLED._replace(num_logprobs=MAX_TOP_LOGPROBS)
EVERYTHING = Needs(True, True, True, True, True, True, num_logprobs=MAX_TOP_LOGPROBS)
KINDS = (GREEDY, SAMPLED, SCORED, EVERYTHING)  # without a grammar
MASKED = EVERYTHING._replace(masks=True)


def covering(needs: Needs) -> Needs:
    """Return the least of KINDS that does all that `needs` asks for; MASKED if it asks for a grammar."""
    if needs.masks:
        return MASKED
    if needs.processes:
        return EVERYTHING
    if needs.num_logprobs is not None:
        return SCORED
    return SAMPLED if needs.is_random or needs.ranks or needs.cuts else GREEDY


_EACH_KIND = (  # with kernels of its own
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, num_logprobs=1),
    SamplingParams(max_tokens=1, temperature=1.0, presence_penalty=0.5),
    SamplingParams(
        max_tokens=2,
        min_tokens=2,
        temperature=1.0,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        stop_ids=(0,),
    ),
)


class SamplingState:
    """Parameters and token history of one choice of a request. It holds a history only if a penalty or a grammar reads
    it."""

    __slots__ = (
        "banned_ids",
        "bias",
        "lasting_needs",
        "num_generated",
        "output_ids",
        "params",
        "prompt_ids",
        "prompt_len",
        "seed",
        "vocab_size",
    )

    params: SamplingParams
    seed: int
    vocab_size: int
    prompt_len: int
    num_generated: int
    prompt_ids: tuple[int, ...]  # those that a repetition penalty counts; else none
    output_ids: list[int]  # generated tokens, if a penalty or a grammar reads them; else none
    bias: dict[int, float]  # `logit_bias` of ids that have a logit
    banned_ids: tuple[int, ...]  # stop ids that have a logit, if min_tokens bans them at first
    lasting_needs: Needs  # those of every token; `bans` is not among them

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Iterable[int] = (),
        *,
        vocab_size: int,
        choice: int = 0,
    ) -> None:
        """`output_ids` are all tokens generated so far, on this node or on others. Ids of `logit_bias` and `stop_ids`
        beyond the vocabulary have no logit and are ignored."""
        output_ids = list(output_ids)
        self.params = params
        self.seed = choice_seed(params.seed, choice)
        self.vocab_size = vocab_size
        self.prompt_len = len(prompt_ids)
        self.num_generated = len(output_ids)
        self.prompt_ids = tuple(prompt_ids) if params.repetition_penalty != 1.0 else ()
        self.output_ids = output_ids if self._reads_output else []
        self.bias = {token_id: value for token_id, value in params.logit_bias.items() if token_id < vocab_size}
        self.banned_ids = ()
        if params.min_tokens > 0 and params.grammar is None:  # a grammar's masks ban them, if others are left
            self.banned_ids = tuple(token_id for token_id in params.stop_ids if token_id < vocab_size)
        is_random = not self.is_greedy
        self.lasting_needs = Needs(
            is_random,
            is_random and (params.top_k > 0 or params.top_p < 1),
            is_random and params.min_p > 0,
            self.penalizes,
            bool(self.bias),
            masks=params.grammar is not None,
            num_logprobs=params.num_logprobs,
        )

    @property
    def position(self) -> int:
        """Absolute position of the token to be sampled next: the length of prompt and output."""
        return self.prompt_len + self.num_generated

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < MIN_TEMPERATURE

    @property
    def bans_stops(self) -> bool:
        """Whether the next token may not end the request."""
        return bool(self.banned_ids) and self.num_generated < self.params.min_tokens

    @property
    def needs(self) -> Needs:
        """Return the needs of the next token and those after it."""
        return self.lasting_needs._replace(bans=True) if self.bans_stops else self.lasting_needs

    @property
    def penalizes(self) -> bool:
        """Whether a penalty changes the logits of tokens that occurred."""
        params = self.params
        return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)

    @property
    def _reads_output(self) -> bool:
        return self.penalizes or self.params.grammar is not None

    def append(self, token_id: int) -> None:
        """Record that `token_id` was generated at `position`."""
        self.num_generated += 1
        if self._reads_output:
            self.output_ids.append(token_id)


def each_kind(vocab_size: int) -> list[SamplingState]:
    """Return states that together ask for every kernel of sampling and of slots but a grammar's. A warm-up runs them;
    else the first request of a kind would hold up all others while its kernels are compiled or loaded. Each state has
    one token of a prompt and one generated token."""
    return [SamplingState(params, [0], [0], vocab_size=vocab_size) for params in _EACH_KIND]


def ended(state: SamplingState, token_id: int, context_len: int, num_cached: int) -> Ended | None:
    """Return the end of the choice if `token_id`, just appended to `state`, is its last token; else None. `num_cached`
    goes into the totals."""
    params = state.params
    is_stop = token_id in params.stop_ids
    if not is_stop and state.num_generated < params.max_tokens and state.position < context_len:
        return None
    return Ended(
        reason="stop" if is_stop else "length",
        stop_id=token_id if is_stop else None,
        num_prompt=state.prompt_len,
        num_generated=state.num_generated,
        num_cached=num_cached,
    )
