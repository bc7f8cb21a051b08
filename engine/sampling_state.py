"""What sampling knows of one request, and of a batch of them.

A `SamplingState` is a pure function of (parameters, choice, prompt ids, output ids): one built anew after a preemption
or on another node equals one that was advanced token by token.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..metadata.request import SamplingParams, choice_seed

MIN_TEMPERATURE = 1e-6  # below it a request is greedy


class SamplingState:
    """Parameters and token history of one choice of a request. Tensors exist only where a parameter needs them."""

    __slots__ = (
        "bias_ids",
        "bias_values",
        "num_generated",
        "output_counts",
        "params",
        "prompt_len",
        "prompt_mask",
        "seed",
        "stop_ids",
    )

    params: SamplingParams
    seed: int
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
        self._allocate(prompt_ids, vocab_size, torch.device(device))
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
    def needs_processing(self) -> bool:
        """Whether a processor changes the next token's logits, before temperature."""
        return self.output_counts is not None or self.bias_ids is not None or self.bans_stops

    def append(self, token_id: int) -> None:
        """Record that `token_id` was generated at `position`."""
        self.num_generated += 1
        if self.output_counts is not None:
            self.output_counts[token_id] += 1

    def ahead(self, num_tokens: int, token_ids: Tensor | None = None) -> Self:
        """This state as it would be after `num_tokens` more tokens, for a draft's position; the original stays.

        `token_ids` [num_tokens] int64 are counted where a penalty asks for it; without one they may be None."""
        later = copy.copy(self)
        later.num_generated += num_tokens
        if later.output_counts is not None and num_tokens:
            assert token_ids is not None and token_ids.shape == (num_tokens,), token_ids
            ones = torch.ones_like(token_ids, dtype=torch.int32)
            later.output_counts = later.output_counts.index_add(0, token_ids, ones)
        return later

    def _allocate(self, prompt_ids: Sequence[int], vocab_size: int, device: torch.device) -> None:
        params = self.params
        self.prompt_mask = self.output_counts = self.bias_ids = self.bias_values = self.stop_ids = None
        if params.repetition_penalty != 1.0:
            self.prompt_mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.prompt_mask[torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            self.output_counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        bias = {token_id: value for token_id, value in params.logit_bias.items() if token_id < vocab_size}
        if bias:
            self.bias_ids = torch.tensor(list(bias.keys()), dtype=torch.int64, device=device)
            self.bias_values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        stop_ids = [token_id for token_id in params.stop_ids if token_id < vocab_size]
        if stop_ids and params.min_tokens > 0:
            self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)

    def _count(self, output_ids: list[int]) -> None:
        self.num_generated += len(output_ids)
        if self.output_counts is not None and output_ids:
            ids = torch.tensor(output_ids, dtype=torch.int64, device=self.output_counts.device)
            self.output_counts += torch.bincount(ids, minlength=len(self.output_counts)).to(torch.int32)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows to sample in one step, as they are when it is built: append tokens to the states afterwards."""

    states: tuple[SamplingState, ...]
    random_rows: tuple[int, ...]  # indices of the rows with a temperature
    seeds: Tensor  # [num_random] int64
    positions: Tensor  # [num_random] int64
    temperatures: Tensor  # [num_random, 1] float32

    @classmethod
    def of(cls, states: Sequence[SamplingState], device: torch.device | str = "cpu") -> Self:
        """One row per state, in order. `device` is that of the logits."""
        rows = tuple(row for row, state in enumerate(states) if not state.is_greedy)
        random = [states[row] for row in rows]
        return cls(
            states=tuple(states),
            random_rows=rows,
            seeds=torch.tensor([state.seed for state in random], dtype=torch.int64, device=device),
            positions=torch.tensor([state.position for state in random], dtype=torch.int64, device=device),
            temperatures=torch.tensor(
                [[state.params.temperature] for state in random], dtype=torch.float32, device=device
            ),
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether one argmax of the raw logits samples every row."""
        return not self.random_rows and not any(state.needs_processing for state in self.states)

    @property
    def num_logprobs(self) -> tuple[int | None, ...]:
        return tuple(state.params.num_logprobs for state in self.states)
