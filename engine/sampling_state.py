"""State of sampling for one choice of a request (for a batch of them: sampling_batch.py).

A `SamplingState` is a pure function of (parameters, choice, prompt ids, output ids): one built anew after a preemption
or on another node equals one that was advanced token by token.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..metadata.wire.request import SamplingParams, choice_seed
from .copies import to_device

MIN_TEMPERATURE = 1e-6  # below it a request is greedy


class Needs(NamedTuple):
    """Which steps of sampling a row asks for, or any row of a batch. The host knows: what nobody asks is not done."""

    is_random: bool = False  # a temperature, so noise
    ranks: bool = False  # top-k or top-p
    cuts: bool = False  # min-p
    penalizes: bool = False
    biases: bool = False
    bans: bool = False  # stop tokens, until min_tokens are there
    num_logprobs: int | None = None

    @classmethod
    def any_of(cls, rows: Iterable[Self]) -> Self:
        """Return the needs of all `rows` together, with the largest number of log-probabilities."""
        columns = list(zip(*rows, strict=True))
        if not columns:
            return cls()
        is_random, ranks, cuts, penalizes, biases, bans = map(any, columns[:-1])
        most = max((num for num in columns[-1] if num is not None), default=None)
        return cls(is_random, ranks, cuts, penalizes, biases, bans, most)

    @property
    def processes(self) -> bool:
        """Whether anything changes logits before temperature."""
        return self.penalizes or self.biases or self.bans

    @property
    def is_plain_greedy(self) -> bool:
        """Whether one argmax of the raw logits samples every row."""
        return not (self.is_random or self.processes)


class SamplingState:
    """Parameters and token history of one choice of a request. Tensors exist only where a parameter needs them."""

    __slots__ = (
        "bias_ids",
        "bias_values",
        "device",
        "num_generated",
        "output_counts",
        "params",
        "prompt_len",
        "prompt_mask",
        "seed",
        "stop_ids",
        "vocab_size",
    )

    params: SamplingParams
    seed: int
    vocab_size: int
    device: torch.device
    prompt_len: int
    num_generated: int
    prompt_mask: Tensor | None  # [vocab_size] bool: id occurs in the prompt; for the repetition penalty
    output_counts: Tensor | None  # [vocab_size] int32: occurrences among output ids; for all three penalties
    bias_ids: Tensor | None  # [num_biased] int64
    bias_values: Tensor | None  # [num_biased] float32
    stop_ids: Tensor | None  # [num_stops] int64, when min_tokens asks to ban them

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Iterable[int] = (),
        *,
        vocab_size: int,
        choice: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`output_ids` are tokens generated so far, wherever that was. Ids of `logit_bias` and `stop_ids` that lie
        beyond the vocabulary have no logit and are ignored."""
        self.params = params
        self.seed = choice_seed(params.seed, choice)
        self.prompt_len = len(prompt_ids)
        self.num_generated = 0
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._allocate(prompt_ids)
        self._count(list(output_ids))

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
        return self.stop_ids is not None and self.num_generated < self.params.min_tokens

    @property
    def needs(self) -> Needs:
        """Return the needs of the next token and those after it."""
        params, is_random = self.params, not self.is_greedy
        return Needs(
            is_random,
            is_random and (params.top_k > 0 or params.top_p < 1),
            is_random and params.min_p > 0,
            self.penalizes,
            self.bias_ids is not None,
            self.bans_stops,
            params.num_logprobs,
        )

    @property
    def penalizes(self) -> bool:
        """Whether tokens that occurred are treated otherwise."""
        params = self.params
        return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)

    def append(self, token_id: int) -> None:
        """Record that `token_id` was generated at `position`."""
        self.num_generated += 1
        if self.output_counts is not None:
            self.output_counts[token_id] += 1

    def forget_history(self) -> None:
        """Somebody else keeps what penalties count (slots.py): from now on only the number of tokens advances."""
        self.prompt_mask = self.output_counts = None

    def seen_in_prompt(self) -> Tensor:
        """[vocab_size] bool, where a repetition penalty counts the prompt's tokens; else no token."""
        if self.prompt_mask is not None:
            return self.prompt_mask
        return torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)

    def counted_output(self) -> Tensor:
        """[vocab_size] int32 of a request with penalties; zeros else, which change nothing."""
        if self.output_counts is not None:
            return self.output_counts
        return torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)

    def dense_bias(self) -> Tensor:
        """[vocab_size] float32."""
        bias = torch.zeros(self.vocab_size, dtype=torch.float32, device=self.device)
        if self.bias_ids is not None and self.bias_values is not None:
            bias.index_copy_(0, self.bias_ids, self.bias_values)
        return bias

    def dense_stops(self) -> Tensor:
        """[vocab_size] bool: what is banned until min_tokens are there."""
        stops = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        if self.stop_ids is not None:
            stops.index_fill_(0, self.stop_ids, True)
        return stops

    def _allocate(self, prompt_ids: Sequence[int]) -> None:
        params, vocab_size, device = self.params, self.vocab_size, self.device
        self.prompt_mask = self.output_counts = self.bias_ids = self.bias_values = self.stop_ids = None
        if params.repetition_penalty != 1.0:
            self.prompt_mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.prompt_mask.index_fill_(0, self._ids(prompt_ids), True)
        if self.penalizes:
            self.output_counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        bias = {token_id: value for token_id, value in params.logit_bias.items() if token_id < vocab_size}
        if bias:
            self.bias_ids = self._ids(list(bias.keys()))
            self.bias_values = to_device(torch.tensor(list(bias.values()), dtype=torch.float32), device)
        stop_ids = [token_id for token_id in params.stop_ids if token_id < vocab_size]
        if stop_ids and params.min_tokens > 0:
            self.stop_ids = self._ids(stop_ids)

    def _count(self, output_ids: list[int]) -> None:
        self.num_generated += len(output_ids)
        if self.output_counts is not None and output_ids:
            ids = self._ids(output_ids)
            self.output_counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        """Return the ids on the device, without waiting for it."""
        return to_device(torch.tensor(token_ids, dtype=torch.int64), self.device)
