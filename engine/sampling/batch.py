"""Rows to sample in one step, as columns of tensors: one pass samples them all, and nothing waits on the host.

A batch is built from the states of requests (`SamplingBatch.of`) or read from the slots of running ones (slots.py).
`ahead` makes the rows of draft tokens from those of their sequences: later positions, with the tokens before them
counted. The functions `fill_..._` write what states say about each token of the vocabulary, for batches and for slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor

from ...kernels.sampling.filters import Filters
from ...kernels.sampling.processors import History, TokenColumns
from ...kernels.sampling.sample import Draws
from ..device import counted, to_device
from .row_shares import Lens, RowShares
from .state import Needs, SamplingState

_ALL_TOKENS = 2**31 - 1  # top_k that cuts nothing
# The columns of a row: what the table declares is what a batch and a slot hold.
_INTS: Mapping[str, Callable[[SamplingState], int]] = MappingProxyType(
    {
        "seed": lambda state: state.seed,
        "position": lambda state: state.position,
        "num_generated": lambda state: state.num_generated,
        "min_tokens": lambda state: state.params.min_tokens,
        "top_k": lambda state: state.params.top_k or _ALL_TOKENS,
    }
)
_FLOATS: Mapping[str, Callable[[SamplingState], float]] = MappingProxyType(
    {
        "temperature": lambda state: 0.0 if state.is_greedy else state.params.temperature,
        "log_min_p": lambda state: math.log(state.params.min_p) if state.params.min_p > 0 else -math.inf,
        "repetition_penalty": lambda state: state.params.repetition_penalty,
        "frequency_penalty": lambda state: state.params.frequency_penalty,
        "presence_penalty": lambda state: state.params.presence_penalty,
    }
)
INTS, FLOATS = tuple(_INTS), tuple(_FLOATS)
_SEED, _POSITION, _NUM_GENERATED, _MIN_TOKENS, _TOP_K = range(len(INTS))
_TEMPERATURE, _LOG_MIN_P, _REPETITION = range(3)  # frequency and presence follow


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Rows of sampling. Tokens that are appended to a state later do not change it. What no row needs is None."""

    needs: Needs
    ints: Tensor  # [len(INTS), num_rows] int64
    floats: Tensor  # [len(FLOATS), num_rows] float32; temperature 0: greedy
    top_p: Tensor  # [num_rows, 1] float64, as exact as the request says it
    history: History | None = None  # None: no column of the vocabulary changes a row before temperature
    logit_ids: Tensor | None = None  # [num_logits] int32, ascending: the tokens of the logits; None: all
    shares: RowShares | None = None  # the ranks that may divide the rows; None: this one samples all
    allowed: Tensor | None = None  # [num_rows, ceil(vocab_size / 32)] int32, as for `process_logits`; None: all tokens

    @classmethod
    def of(cls, states: Sequence[SamplingState], device: torch.device | str = "cpu") -> Self:
        """Return one row per state, in order, on `device`, which is that of the logits."""
        needs = Needs.any_of(state.needs for state in states)
        rows = [columns(state) for state in states]

        def filled(fill_: Fill, dtype: torch.dtype) -> Tensor:
            column = torch.zeros(len(states), states[0].vocab_size, dtype=dtype, device=device)
            fill_(column, states)
            return column

        return cls(
            needs,
            _transposed([ints for ints, _, _ in rows], torch.int64, device),
            _transposed([floats for _, floats, _ in rows], torch.float32, device),
            to_device(torch.tensor([top_p for _, _, top_p in rows], dtype=torch.float64), device).unsqueeze(1),
            History.of(filled_columns(needs, filled), counted(len(states), torch.device(device)))
            if needs.processes
            else None,
        )

    @property
    def num_rows(self) -> int:
        return self.ints.shape[1]

    @property
    def seeds(self) -> Tensor:
        """[num_rows] int64."""
        return self.ints[_SEED]

    @property
    def positions(self) -> Tensor:
        """[num_rows] int64, absolute position of the token to be sampled."""
        return self.ints[_POSITION]

    @property
    def draws(self) -> Draws | None:
        """How rows are drawn; None if all are greedy."""
        if not self.needs.is_random:
            return None
        filters, log_min_p = None, self.floats[_LOG_MIN_P]
        if self.needs.ranks:
            filters = Filters(log_min_p, self.ints[_TOP_K], self.top_p.squeeze(1))
        elif self.needs.cuts:
            filters = Filters(log_min_p)
        return Draws(self.seeds, self.positions, self.floats[_TEMPERATURE], filters)

    @property
    def penalties(self) -> Tensor:
        """[3, num_rows] float32: repetition (1: none), frequency and presence (0: none)."""
        return self.floats[_REPETITION:]

    @property
    def bans_now(self) -> Tensor:
        """[num_rows] bool: the next token may not end the request."""
        return self.ints[_NUM_GENERATED] < self.ints[_MIN_TOKENS]

    def over(self, logit_ids: Tensor | None) -> Self:
        """Return the same rows for logits of the tokens `logit_ids` alone, [num_logits] int32, ascending; None: of all
        tokens. The sampled tokens are those of logits with -inf for all others."""
        return self if logit_ids is None else replace(self, logit_ids=logit_ids)

    def within(self, allowed: Tensor | None) -> Self:
        """Return the same rows, of which each may have the tokens that `allowed` says, and no others."""
        return self if allowed is None else replace(self, allowed=allowed)

    def lens(self, num_rows: int) -> Lens | None:
        """Return how ranks divide `num_rows` rows of this batch, or of one `ahead` of it, if they sample them; None:
        every rank samples all. Greedy rows are not divided."""
        return None if self.shares is None or self.needs.is_plain_greedy else self.shares.lens(num_rows)

    def part(self, rows: slice) -> Self:
        """Return some rows that follow each other, with views of what kernels read by the row. No rank divides them."""
        return replace(
            self,
            ints=self.ints[:, rows],
            floats=self.floats[:, rows].contiguous(),
            top_p=self.top_p[rows],
            history=None if self.history is None else self.history.part(rows),
            shares=None,
            allowed=None if self.allowed is None else self.allowed[rows],
        )

    def take(self, index: Tensor) -> Self:
        """Return the rows `index` [num_taken] int64."""
        return type(self)(
            self.needs,
            self.ints.index_select(1, index),
            self.floats.index_select(1, index),
            self.top_p.index_select(0, index),
            None if self.history is None else self.history.take(index),
            self.logit_ids,
            self.shares,
            None if self.allowed is None else self.allowed.index_select(0, index),
        )

    def ahead(self, num_ahead: Tensor, tokens: Tensor, is_before: Tensor | None = None) -> Self:
        """Return rows for positions further on, n for each row of this: [num_rows * n] rows, a row's n together. What
        grammars allow there is not known yet.

        Args:
            num_ahead: [num_rows or 1, n] int64, how many tokens come between.
            tokens: [num_rows, m] int64, tokens that this does not know yet.
            is_before: [num_rows or 1, n, m] bool, which of them come before a new row and are counted by its
                penalties; None: all.

        If all rows are plainly greedy, nothing of them is ever read, and the result is this itself.
        """
        if self.needs.is_plain_greedy:
            return self
        num_new = num_ahead.shape[1]
        ints = self.ints.unsqueeze(2).repeat(1, 1, num_new)
        ints[_POSITION] += num_ahead
        ints[_NUM_GENERATED] += num_ahead
        return type(self)(
            self.needs,
            ints.flatten(1),
            self.floats.repeat_interleave(num_new, 1),
            self.top_p.repeat_interleave(num_new, 0),
            None if self.history is None else self.history.ahead(num_new, tokens, is_before),
            self.logit_ids,
            self.shares,
        )


def columns(state: SamplingState) -> tuple[list[int], list[float], float]:
    """Return a row's INTS, FLOATS and top_p."""
    ints, floats = [read(state) for read in _INTS.values()], [read(state) for read in _FLOATS.values()]
    return ints, floats, state.params.top_p


Fill = Callable[[Tensor, Sequence[SamplingState]], None]


def filled_columns(needs: Needs, make: Callable[[Fill, torch.dtype], Tensor]) -> TokenColumns:
    """Return the columns that `needs` asks for, each made of what fills it and its dtype."""
    return TokenColumns(
        make(fill_prompt_mask_, torch.bool) if needs.penalizes else None,
        make(fill_output_counts_, torch.int32) if needs.penalizes else None,
        make(fill_bias_, torch.float32) if needs.biases else None,
        make(fill_stops_, torch.bool) if needs.bans else None,
    )


def fill_prompt_mask_(mask: Tensor, states: Sequence[SamplingState]) -> None:
    """Mark the prompt's ids that a repetition penalty counts in `mask` [num_states, vocab_size] bool, all False."""
    cells = _cells(states, [state.prompt_ids for state in states])
    if cells:
        mask.view(-1).index_fill_(0, _ids(cells, mask.device), True)


def fill_output_counts_(counts: Tensor, states: Sequence[SamplingState]) -> None:
    """Count the generated ids that a penalty counts in `counts` [num_states, vocab_size] int32, all 0."""
    cells = _cells(states, [state.output_ids for state in states])
    if cells:
        ids = _ids(cells, counts.device)
        counts.view(-1).scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))  # as Slots.advance


def fill_bias_(bias: Tensor, states: Sequence[SamplingState]) -> None:
    """Write the bias of each id into `bias` [num_states, vocab_size] float32, all 0."""
    cells = _cells(states, [list(state.bias) for state in states])
    if cells:
        values = torch.tensor([value for state in states for value in state.bias.values()], dtype=torch.float32)
        bias.view(-1).index_copy_(0, _ids(cells, bias.device), to_device(values, bias.device))


def fill_stops_(stops: Tensor, states: Sequence[SamplingState]) -> None:
    """Mark the ids that min_tokens bans at first in `stops` [num_states, vocab_size] bool, all False."""
    cells = _cells(states, [state.banned_ids for state in states])
    if cells:
        stops.view(-1).index_fill_(0, _ids(cells, stops.device), True)


def _cells(states: Sequence[SamplingState], rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the flat indices of each row's ids in a column [num_states, vocab_size]."""
    return [
        row * state.vocab_size + token_id
        for row, (state, ids) in enumerate(zip(states, rows, strict=True))
        for token_id in ids
    ]


def _ids(cells: list[int], device: torch.device) -> Tensor:
    """Return the indices on the device, without waiting for it."""
    return to_device(torch.tensor(cells, dtype=torch.int64), device)


def _transposed(rows: list[list[int]] | list[list[float]], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return the rows as columns, which lie contiguous, as kernels take them."""
    return to_device(torch.tensor(list(zip(*rows, strict=True)), dtype=dtype), device)
