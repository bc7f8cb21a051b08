"""Slots: the state of each running sequence on the device. A slot is a row of tensors.

A round reads the rows of its sequences and writes back what it brought. So only the pages of a sequence are copied to
the device again, and a round can follow another before the host has seen the tokens of the first. The last row is
padding's: if a bucket has more rows than sequences, the other rows read it. It never changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.sampling.processors import History, TokenColumns
from ...kernels.state.rows import Columns, advance_, assign_rows_, gather_rows, load_column_
from ..device import PinnedRows, counted, to_device
from ..drafters.base import Drafter, DraftState, RoundRows
from ..sampling.batch import (
    FLOATS,
    INTS,
    Fill,
    SamplingBatch,
    columns,
    fill_bias_,
    fill_output_counts_,
    fill_prompt_mask_,
    fill_stops_,
)
from ..sampling.row_shares import RowShares
from ..sampling.state import Needs, SamplingState
from ..work import MAX_MISSED

_LENGTH, _LAST_TOKEN = 0, 1  # before INTS
_POSITION, _NUM_GENERATED, _TOP_K = (2 + INTS.index(name) for name in ("position", "num_generated", "top_k"))
_COLUMNS = Columns((_LENGTH, _POSITION, _NUM_GENERATED), _LAST_TOKEN)
_REPETITION = FLOATS.index("repetition_penalty")
_PADDING_LENGTH = 1
_FILLS: tuple[Fill, ...] = (fill_prompt_mask_, fill_output_counts_, fill_bias_, fill_stops_)


class Slots:
    """Owns the rows. Columns of one number per token of the vocabulary exist once a request needs them."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        drafter: Drafter | None,
        device: torch.device,
        shares: RowShares | None = None,
    ) -> None:
        """`shares`: the ranks that divide the rows of a batch; None: this one samples all."""
        self.num_slots = num_slots
        self._shares = shares
        self.device = device
        self._vocab_size = vocab_size
        num_rows = num_slots + 1
        self._ints = torch.zeros(2 + len(INTS), num_rows, dtype=torch.int64, device=device)
        self._floats = torch.zeros(len(FLOATS), num_rows, device=device)
        self._floats[_REPETITION] = 1.0
        self._top_p = torch.ones(num_rows, 1, dtype=torch.float64, device=device)
        self._loaded = PinnedRows(2 + len(INTS) + len(FLOATS) + 1, device)
        self._prompt_mask: Tensor | None = None
        self._output_counts: Tensor | None = None
        self._bias: Tensor | None = None
        self._stops: Tensor | None = None
        self._written: dict[Fill, set[int]] = {each: set() for each in _FILLS}  # slots whose columns hold values
        self._draft = DraftState() if drafter is None else drafter.allocate(num_rows)
        # Rows that rounds without drafts keep for a drafter with KV, MAX_MISSED + 1 of each slot, the last for waste:
        # the token at the row's position [.., 1] and the extend state [.., width], if the drafter takes one.
        self._missed: list[Tensor] = []
        if drafter is not None and drafter.has_kv:
            num_missed = num_rows * (MAX_MISSED + 1)
            states = drafter.hidden.allocate("extend", num_missed, device)
            tokens = torch.zeros(num_missed, 1, dtype=torch.int64, device=device)
            self._missed = [tokens] if states is None else [tokens, states]
        column = [0] * (2 + len(INTS))  # padding: a greedy sequence of one token
        column[_LENGTH], column[_TOP_K] = _PADDING_LENGTH, 1  # of any rank but 0, which no row has
        reals = [0.0] * len(FLOATS) + [1.0]
        reals[_REPETITION] = 1.0
        self._load_numbers(self.padding, column, reals)
        self._padding_ints = torch.tensor(column).to(device)

    @property
    def padding(self) -> int:
        return self.num_slots

    def load(self, slot: int, length: int, last_token: int, state: SamplingState, draft: DraftState | None) -> None:
        """Load a sequence of `length` tokens with KV and the one after them; `state` is after that one. `draft` has one
        row, and is None without speculation."""
        assert state.position == length + 1, (state.position, length)
        ints, floats, top_p = columns(state)
        self._load_numbers(slot, [length, last_token, *ints], [*floats, top_p])
        if state.penalizes and self._prompt_mask is None:
            self._prompt_mask, self._output_counts = self._per_token(torch.bool), self._per_token(torch.int32)
        if state.bias and self._bias is None:
            self._bias = self._per_token(torch.float32)
        if state.banned_ids and self._stops is None:
            self._stops = self._per_token(torch.bool)
        self._load_column(slot, self._prompt_mask, fill_prompt_mask_, state if state.penalizes else None)
        self._load_column(slot, self._output_counts, fill_output_counts_, state if state.penalizes else None)
        self._load_column(slot, self._bias, fill_bias_, state if state.bias else None)
        self._load_column(slot, self._stops, fill_stops_, state if state.banned_ids else None)
        if draft is not None:
            self.load_draft(to_device(torch.tensor([slot]), self.device), draft)

    def _load_numbers(self, row: int, ints: Sequence[int], reals: Sequence[float]) -> None:
        """Load the columns of one number per slot."""
        loaded = self._loaded.take()
        values = loaded.numpy()
        values[: len(ints)] = ints
        values[len(ints) :].view(np.float64)[:] = reals
        load_column_(self._ints, self._floats, self._top_p.view(1, -1), loaded, row)

    def _load_column(self, slot: int, column: Tensor | None, fill_: Fill, state: SamplingState | None) -> None:
        """Fill a slot's column of the vocabulary for `state`, or with zeros if an earlier request has filled it. Rounds
        may have counted tokens in it since; a request without penalties does not read them."""
        written = self._written[fill_]
        if column is None or (state is None and slot not in written):
            return
        own = column[slot].zero_()
        if state is None:
            written.remove(slot)
        else:
            fill_(own, [state])
            written.add(slot)

    def load_draft(self, index: Tensor, draft: DraftState) -> None:
        """Store the drafter's state of the slots `index` [num_rows] int64, all different. Raises ValueError for a state
        of another shape or dtype than the drafter's."""
        self._draft.store(index, draft.to(self.device))

    def read(
        self,
        index: Tensor,
        block_table: Tensor,
        needs: Needs,
        proposed: Tensor | None = None,
        *,
        with_draft: bool = True,
        tail_table: Tensor | None = None,
    ) -> RoundRows:
        """Return copies of the rows `index` [num_seqs] int64; but columns of the vocabulary are read where they lie, so
        use them before `advance`. The rows lack the columns that `needs` does not ask for, and the drafter's state if
        `with_draft` is False."""
        ints = self._ints[:, index]  # torch's index_select takes one after the other of up to 16
        floats, top_p = self._floats, self._top_p
        if not needs.is_plain_greedy:
            floats, top_p = floats[:, index], top_p[index]

        history = None
        if needs.processes:
            own = TokenColumns(
                self._prompt_mask if needs.penalizes else None,
                self._output_counts if needs.penalizes else None,
                self._bias if needs.biases else None,
                self._stops if needs.bans else None,
            )
            history = History.of(own, index)
        sampling = SamplingBatch(needs, ints[2:], floats, top_p, history, shares=self._shares)
        draft = self._draft.select(index) if with_draft else DraftState()
        return RoundRows(ints[_LENGTH], ints[_LAST_TOKEN], block_table, sampling, draft, proposed, tail_table)

    def allocate_all(self) -> None:
        """Allocate all columns of the vocabulary, for graphs, which need them at fixed addresses."""
        if self._prompt_mask is None:
            self._prompt_mask, self._output_counts = self._per_token(torch.bool), self._per_token(torch.int32)
        self._bias = self._per_token(torch.float32) if self._bias is None else self._bias
        self._stops = self._per_token(torch.bool) if self._stops is None else self._stops

    def advance(
        self,
        index: Tensor,
        targets: Tensor,
        is_valid: Tensor,
        num_accepted: Tensor,
        draft: DraftState | None,
        needs: Needs,
    ) -> Tensor:
        """Record that a round brought `targets` [num_seqs, K + 1] int64 up to column `num_accepted` [num_seqs], if they
        are `is_valid`, and the state for the next round, None if nothing was drafted. Return the numbers that the host
        reads, as `advance_ref_`."""
        numbers = advance_(self._ints, _COLUMNS, index, targets, is_valid, num_accepted, self._padding_ints)
        if needs.penalizes and self._output_counts is not None:
            step = counted(targets.shape[1], targets.device)
            is_new = (step <= num_accepted.unsqueeze(1)) & (index != self.padding).unsqueeze(1)
            at = index.unsqueeze(1) * self._vocab_size + targets
            self._output_counts.view(-1).scatter_add_(0, at.flatten(), is_new.flatten().to(torch.int32))
        if draft is not None:
            self._draft.store(index, draft)
        return numbers

    def keep_missed(self, rows: Tensor, tokens: Tensor, extend: Tensor | None) -> None:
        """Keep the rows that a round without drafts left out, at `rows` [num_seqs] int64: the `tokens` [num_seqs] int64
        that it ran, and their states [num_seqs, extend width], None if the drafter takes none."""
        kept = [tokens.unsqueeze(1)]
        assign_rows_(self._missed, rows, kept if extend is None else [*kept, extend])

    def missed(
        self, first: Tensor, num_missed: Tensor, last_tokens: Tensor, num_rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return kept rows that the drafter has not seen: tokens [num_seqs, num_rows + 1] int64, and their states
        [num_seqs, num_rows, extend width], None if the drafter takes none.

        `first` [num_seqs] int64: where the rows of each sequence begin. `num_missed` [num_seqs] int64: how many rows it
        lacks from there; at most `num_rows` of them are returned. Behind them comes its token of `last_tokens`
        [num_seqs] int64, then any tokens. The states behind them are zeros: kept rows of other sequences may hold NaN,
        and a masked NaN spoils rows that do not see it."""
        assert num_rows <= MAX_MISSED, num_rows  # what is beyond a slot's rows is another's, not the end
        step = counted(num_rows + 1, first.device)
        index = first.unsqueeze(1) + step
        tokens, *states = gather_rows(self._missed, index.flatten())
        tokens = torch.where(step == num_missed.unsqueeze(1), last_tokens.unsqueeze(1), tokens.view(index.shape))
        if not states:
            return tokens, None
        is_beyond = (step >= num_missed.unsqueeze(1)).unsqueeze(2)
        return tokens, states[0].view(*index.shape, states[0].shape[-1]).masked_fill_(is_beyond, 0.0)[:, :-1]

    def _per_token(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.num_slots + 1, self._vocab_size, dtype=dtype, device=self.device)


def missed_row(slot: NDArray[np.int64], num_missed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each slot keeps a row that the drafter does not see, after `num_missed` others. The rows from
    MAX_MISSED on are lost: they share one place."""
    return slot * (MAX_MISSED + 1) + np.minimum(num_missed, MAX_MISSED)
