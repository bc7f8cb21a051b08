"""Logit processors, which apply a request's parameters and token history to its logits before the temperature.

Order (vLLM's): logit_bias, min_tokens, repetition penalty, frequency penalty, presence penalty; then what a grammar
allows. Only elementwise IEEE operations without fusion, so a row's result does not depend on the rows beside it: one
that asks for nothing gets zeros added and is divided by one. A NaN stays one, so that the row is known to hold no
numbers.

What a sequence's history says of each token of the vocabulary lies in columns of a table, which rows of a batch share:
the nodes of a draft differ in a few drafted tokens only, so these are looked up, and no row has columns of its own.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..operations import Operation
from .noise import check_token_ids


class TokenColumns(NamedTuple):
    """A table with one number for each token of the vocabulary in each column, [num_kept, vocab_size] each. None: no
    row needs the column."""

    prompt_mask: Tensor | None = None  # bool: the id occurs in the prompt and counts as seen
    output_counts: Tensor | None = None  # int32: occurrences among output ids; there if prompt_mask is
    bias: Tensor | None = None  # float32
    stops: Tensor | None = None  # bool: banned until min_tokens are there


class History(NamedTuple):
    """Prompt, output and parameters of each row of a batch, as the processors read them: by token of the vocabulary."""

    columns: TokenColumns
    places: Tensor  # [num_rows] int64: the row of the table that each row reads
    drafted: Tensor  # [num_rows, m] int64: tokens that `output_counts` does not know yet
    is_counted: Tensor  # [num_rows, m] bool: which of them come before the row's token

    @classmethod
    def of(cls, columns: TokenColumns, places: Tensor) -> Self:
        """Return the history of rows without drafts."""
        drafted = places.new_empty(len(places), 0)
        return cls(columns, places, drafted, drafted.to(torch.bool))

    def ahead(self, num_new: int, tokens: Tensor, is_before: Tensor | None) -> Self:
        """Return the history of `num_new` rows for each row of this, a row's together. `tokens` [num_rows, m] int64 are
        new, and `is_before` [num_rows or 1, num_new, m] bool says which of them come before a new row; None: all."""
        places = self.places.repeat_interleave(num_new)
        if self.columns.output_counts is None:
            return type(self).of(self.columns, places)
        shape = (len(tokens), num_new, tokens.shape[1])
        counted = torch.ones(1, 1, 1, dtype=torch.bool, device=tokens.device) if is_before is None else is_before
        new, counted = tokens.unsqueeze(1).expand(shape).flatten(0, 1), counted.expand(shape).flatten(0, 1)
        drafted = torch.cat([self.drafted.repeat_interleave(num_new, 0), new], dim=1)
        counted = torch.cat([self.is_counted.repeat_interleave(num_new, 0), counted], dim=1)
        return self._replace(places=places, drafted=drafted, is_counted=counted)

    def part(self, rows: slice) -> Self:
        """Return some rows that follow each other, as views."""
        return type(self)(self.columns, *(each[rows] for each in self[1:]))

    def take(self, index: Tensor) -> Self:
        """Return the rows `index` [num_taken] int64."""
        return type(self)(self.columns, *(each.index_select(0, index) for each in self[1:]))

    def rows(self, token_ids: Tensor | None = None) -> TokenColumns:
        """Return copies of the columns of each row, [num_rows, vocab_size], with the drafted tokens counted. With
        `token_ids` [num_ids] int32, ascending, the columns have these tokens alone: [num_rows, num_ids]."""
        if token_ids is None:
            mask, counts, bias, stops = (
                None if each is None else each.index_select(0, self.places) for each in self.columns
            )
            at, is_counted = self.drafted, self.is_counted
        else:
            places = self.places.unsqueeze(1)
            mask, counts, bias, stops = (None if each is None else each[places, token_ids] for each in self.columns)
            drafted = self.drafted.to(torch.int32)
            at = torch.searchsorted(token_ids, drafted).clamp_(max=len(token_ids) - 1)
            is_counted = self.is_counted & (token_ids[at] == drafted)
        if counts is not None:
            counts.scatter_add_(1, at, is_counted.to(counts.dtype))
        return TokenColumns(mask, counts, bias, stops)


def process_logits_ref(
    logits: Tensor,
    history: History,
    penalties: Tensor,
    bans_now: Tensor,
    logit_ids: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Return the processed logits, [num_rows, num_logits] float32, a new tensor.

    Args:
        logits: [num_rows, num_logits] float32, bfloat16 or float16, rows contiguous; left as it was.
        penalties: [3, num_rows] float32, contiguous: repetition (1: none), frequency and presence (0: none).
        bans_now: [num_rows] bool: the token may not end the request.
        logit_ids: [num_logits] int32, ascending, the token of each logit; None: logit i is of token i.
        allowed: [num_rows, num_words] int32, the tokens that a grammar allows: token i is bit i % 32 of word i // 32;
            None: all, in every row.
    """
    assert logits.ndim == 2 and len(logits) == len(history.places), (logits.shape, history.places.shape)
    if logit_ids is not None:
        check_token_ids(logits, logit_ids)
    scores, (prompt_mask, counts, bias, stops) = logits.to(torch.float32, copy=True), history.rows(logit_ids)
    if bias is not None:
        scores += bias
    if stops is not None:
        scores.masked_fill_(stops & bans_now.unsqueeze(1) & ~scores.isnan(), float("-inf"))
    if counts is not None and prompt_mask is not None:
        _penalize(scores, penalties, prompt_mask, counts)
    if allowed is not None:
        ids = torch.arange(scores.shape[1], device=scores.device) if logit_ids is None else logit_ids
        is_allowed = (allowed[:, ids // 32] >> (ids % 32)) & 1 != 0
        scores.masked_fill_(~is_allowed & ~scores.isnan(), float("-inf"))
    return scores


process_logits = Operation("process_logits", process_logits_ref)


def _penalize(logits: Tensor, penalties: Tensor, prompt_mask: Tensor, counts: Tensor) -> None:
    """Apply repetition over prompt and output (Keskar et al. 2019, arXiv:1909.05858: divide what is positive, multiply
    the rest); frequency and presence over the output alone, subtracted."""
    assert logits.shape == counts.shape == prompt_mask.shape, (logits.shape, counts.shape, prompt_mask.shape)
    repetition, frequency, presence = penalties.unsqueeze(2).unbind()
    occurs = counts > 0
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(prompt_mask | occurs, penalized, logits))
    logits -= counts.to(torch.float32).mul_(frequency)
    logits -= occurs.to(torch.float32).mul_(presence)
