"""Slots: the state of each running sequence on the device. A slot is a row of tensors.

A round reads the rows of its sequences, and writes back what it brought. So nothing of a sequence but its pages is
copied to the device a second time, and a round could follow another before the host has seen the first's tokens. The
last row is padding's: sequences that a bucket has too few of read it, and it stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.advance import Columns, advance_
from ..kernels.rows import assign_rows_, gather_rows
from .constants import counted
from .copies import to_device
from .drafters.base import Drafter, DraftState, RoundRows
from .sampling_batch import (
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
from .sampling_state import Needs, SamplingState
from .work import MAX_MISSED

_LENGTH, _LAST_TOKEN = 0, 1  # before INTS
_POSITION, _NUM_GENERATED, _TOP_K = (2 + INTS.index(name) for name in ("position", "num_generated", "top_k"))
_COLUMNS = Columns((_LENGTH, _POSITION, _NUM_GENERATED), _LAST_TOKEN)
_REPETITION = FLOATS.index("repetition_penalty")
_PADDING_LENGTH = 1


class Slots:
    """Owns the rows. Per-vocabulary columns exist once a request asks for what they serve."""

    def __init__(self, num_slots: int, vocab_size: int, drafter: Drafter | None, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self._vocab_size = vocab_size
        num_rows = num_slots + 1
        self._ints = torch.zeros(2 + len(INTS), num_rows, dtype=torch.int64, device=device)
        self._floats = torch.zeros(len(FLOATS), num_rows, device=device)
        self._floats[_REPETITION] = 1.0
        self._top_p = torch.ones(num_rows, 1, dtype=torch.float64, device=device)
        self._prompt_mask: Tensor | None = None
        self._output_counts: Tensor | None = None
        self._bias: Tensor | None = None
        self._stops: Tensor | None = None
        self._draft = DraftState() if drafter is None else drafter.allocate(num_rows)
        # What rounds without drafts keep for a drafter with KV, MAX_MISSED + 1 rows of each slot, the last a waste bin:
        # the token at the row's position [.., 1] and the extend state [.., width], where it takes one.
        self._missed: list[Tensor] = []
        if drafter is not None and drafter.has_kv:
            num_missed = num_rows * (MAX_MISSED + 1)
            states = drafter.hidden.allocate("extend", num_missed, device)
            tokens = torch.zeros(num_missed, 1, dtype=torch.int64, device=device)
            self._missed = [tokens] if states is None else [tokens, states]
        column = torch.zeros(2 + len(INTS), dtype=torch.int64)  # padding: a greedy sequence of one token
        column[_LENGTH], column[_TOP_K] = _PADDING_LENGTH, 1  # of any rank but 0, which no row has
        self._padding_ints = column.to(device)
        self._free = list(range(num_slots - 1, -1, -1))
        self._ints[:, self.padding] = self._padding_ints

    @property
    def padding(self) -> int:
        return self.num_slots

    def take(self) -> int:
        """A free slot; whoever takes it loads it, and gives it back."""
        assert self._free, "more sequences run than there are slots"
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        assert slot not in self._free and 0 <= slot < self.num_slots, slot
        self._free.append(slot)

    def load(self, slot: int, length: int, last_token: int, state: SamplingState, draft: DraftState | None) -> None:
        """A sequence of `length` tokens with KV and the one after them, `state` with both; `draft` of one row, None
        without speculation."""
        assert state.position == length + 1, (state.position, length)
        ints, floats, top_p = columns(state)
        self._ints[:, slot] = to_device(torch.tensor([length, last_token, *ints]), self.device)
        self._floats[:, slot] = to_device(torch.tensor(floats), self.device)
        self._top_p[slot] = top_p
        if state.penalizes and self._prompt_mask is None:
            self._prompt_mask, self._output_counts = self._per_token(torch.bool), self._per_token(torch.int32)
        if state.bias and self._bias is None:
            self._bias = self._per_token(torch.float32)
        if state.banned_ids and self._stops is None:
            self._stops = self._per_token(torch.bool)
        fills: list[tuple[Tensor | None, Fill]] = [
            (self._prompt_mask, fill_prompt_mask_),
            (self._output_counts, fill_output_counts_),
            (self._bias, fill_bias_),
            (self._stops, fill_stops_),
        ]
        for column, fill_ in fills:
            if column is not None:
                fill_(column[slot].zero_(), [state])
        if draft is not None:
            self.load_draft(to_device(torch.tensor([slot]), self.device), draft)

    def load_draft(self, index: Tensor, draft: DraftState) -> None:
        """Of the slots `index` [num_rows] int64, all different. Raises ValueError for a state of another shape or dtype
        than the drafter's."""
        self._draft.store(index, draft.to(self.device))

    def read(
        self,
        index: Tensor,
        block_table: Tensor,
        needs: Needs,
        proposed: Tensor | None = None,
        *,
        with_draft: bool = True,
    ) -> RoundRows:
        """The rows `index` [num_seqs] int64, copied; what `needs` does not ask for is left out, and the drafter's state
        without `with_draft`."""
        ints = self._ints[:, index]  # torch's index_select takes one after the other of up to 16
        floats, top_p = self._floats, self._top_p
        if not needs.is_plain_greedy:
            floats, top_p = floats[:, index], top_p[index]

        def rows(column: Tensor | None, is_needed: bool) -> Tensor | None:
            return column.index_select(0, index) if is_needed and column is not None else None

        sampling = SamplingBatch(
            needs,
            ints[2:],
            floats,
            top_p,
            rows(self._prompt_mask, needs.penalizes),
            rows(self._output_counts, needs.penalizes),
            rows(self._bias, needs.biases),
            rows(self._stops, needs.bans),
        )
        draft = self._draft.select(index) if with_draft else DraftState()
        return RoundRows(ints[_LENGTH], ints[_LAST_TOKEN], block_table, sampling, draft, proposed)

    def allocate_all(self) -> None:
        """All per-vocabulary columns, for graphs that must find them where they are for good."""
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
        """A round brought `targets` [num_seqs, K + 1] int64 up to column `num_accepted` [num_seqs], where they are
        `is_valid`, and the state for the next one, None where nothing was drafted. Returns what the host reads, as
        `advance_ref_`."""
        numbers = advance_(self._ints, _COLUMNS, index, targets, is_valid, num_accepted, self._padding_ints)
        if needs.penalizes and self._output_counts is not None:
            step = counted(targets.shape[1], targets.device)
            is_new = (step <= num_accepted.unsqueeze(1)).to(torch.int32)
            self._output_counts.index_put_((index.unsqueeze(1), targets), is_new, accumulate=True)
            self._output_counts[self.padding] = 0
        if draft is not None:
            self._draft.store(index, draft)
        return numbers

    def missed_row(self, slot: int, num_missed: int) -> int:
        """Return where `keep_missed` puts a row after `num_missed` others; from MAX_MISSED on they are lost."""
        return slot * (MAX_MISSED + 1) + min(num_missed, MAX_MISSED)

    def keep_missed(self, rows: Tensor, tokens: Tensor, extend: Tensor | None) -> None:
        """What a round without drafts left out, at `rows` [num_seqs] int64: the `tokens` [num_seqs] int64 that it ran,
        and their states [num_seqs, extend width], None where the drafter takes none."""
        kept = [tokens.unsqueeze(1)]
        assign_rows_(self._missed, rows, kept if extend is None else [*kept, extend])

    def missed(
        self, first: Tensor, num_missed: Tensor, last_tokens: Tensor, num_rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """`num_rows` of what was kept from the rows `first` [num_seqs] int64 on, of sequences that lack as many as
        `num_missed` [num_seqs] int64 from there: tokens [num_seqs, num_rows + 1], `last_tokens` [num_seqs] int64 behind
        those that they lack, and states [num_seqs, num_rows, extend width] or None. Beyond are any tokens and zeros:
        rows of others might hold no numbers, and a masked key that is none spoils the rows that do not see it."""
        assert num_rows <= MAX_MISSED, num_rows  # what is beyond a slot's rows is another's, not the end
        step = counted(num_rows + 1, first.device)
        index = first.unsqueeze(1) + step
        tokens, *states = gather_rows(self._missed, index.flatten())
        tokens = torch.where(step == num_missed.unsqueeze(1), last_tokens.unsqueeze(1), tokens.view(index.shape))
        if not states:
            return tokens, None
        is_beyond = (step >= num_missed.unsqueeze(1)).unsqueeze(2)
        return tokens, states[0].view(*index.shape, -1).masked_fill_(is_beyond, 0.0)[:, :-1]

    def _per_token(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.num_slots + 1, self._vocab_size, dtype=dtype, device=self.device)
