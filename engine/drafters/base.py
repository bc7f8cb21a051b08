"""Drafters: a node that speculates has one. A drafter proposes the next tokens of sequences.

Positions. A sequence has L tokens with target KV, at positions 0 .. L - 1. Its bonus token, the last one sampled,
belongs at position L. A round of K steps:

    propose   d_1 .. d_K for positions L + 1 .. L + K, or a tree K deep
    verify    the target runs bonus, d_1 .. d_K at positions L .. L + K and samples t_0 .. t_K for L + 1 .. L + K + 1
    accept    a is the number of leading d_j that equal t_(j-1); t_0 .. t_a are new, t_a is the next bonus, L grows by
              a + 1
    observe   the drafter sees the target's hidden states and tokens of L .. L + K along the accepted path and makes its
              own state for L + a + 1

`propose` and `observe` work on tensors with a fixed number of rows: neither they nor the functions that they call read
a value of a tensor on the host.

A round without drafts skips `observe` if that would store KV. The drafter catches up later, as if one round had brought
all skipped tokens: `observe` with `MissedRows`.

The same drafter computes prompts. A prefill node calls `observe_prompt` for each chunk, and `finish_prompt` once the
token after the prompt is sampled. A decode node that recomputes a preempted sequence calls `observe_prompt` alone,
because the sequence's slot has kept its state.

Zero rows. A node without work runs nothing, but a rank without sequences does what the others do (agreement.py). So
every method takes zero rows: `propose` and `observe` run the same forwards on them, and `finish_prompt` stores no KV,
returns a state of zero rows with the fields, widths and dtypes of any other, and refuses `hidden` [0, width] of a wrong
width. The last token of a prompt leaves `observe_prompt` without a row of its own if the drafter is shifted: if its
KV at position i depends on tokens after i (the schema's `key_lookahead` says on how many).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

import torch
from torch import Tensor

from ...kernels.state.rows import assign_rows_, gather_rows, packed, unpacked
from ...metadata.handoff.schema.buffers import MetadataBuffers
from ...metadata.handoff.schema.hidden_layout import HiddenLayout, assign
from ...metadata.wire.node_info import HandoffSchema
from ..device import counted, to_device, to_host
from ..pace.draft_length import DraftShape
from ..rounds.executor import HostProposer
from ..rounds.trees import Drafts
from ..sampling.batch import SamplingBatch
from ..state.model_pools import ModelPools


@dataclass(frozen=True, slots=True, eq=False)
class DraftState:
    """A drafter's state between rounds, besides KV, which prefill hands to decode. One row per sequence; a field that
    the drafter does not have is None."""

    tokens: Tensor | None = None  # [num_rows, num_proposals] int64: d_1 .. of the next round, or topk choices for d_1
    scores: Tensor | None = None  # [num_rows, topk] float32, if trees rank
    hidden: Tensor | None = None  # [num_rows, recurrent width]
    rows: Tensor | None = None  # [num_rows, num_target_rows, extend width] of positions .. L - 1; zeros before 0
    recent: Tensor | None = None  # [num_rows, num_target_rows] int64: tokens .. L, the bonus last; zeros before 0

    def __len__(self) -> int:
        """Return the number of rows; 0 if there is no field at all."""
        return next((len(value) for _, value in self.present()), 0)

    def present(self) -> list[tuple[str, Tensor]]:
        """Return the names and values of the fields that the drafter has."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, value) for name, value in values if value is not None]

    def row(self, index: int) -> Self:
        """Return one sequence's state, a copy [1, ...]."""
        return type(self)(**{name: value[index : index + 1].clone() for name, value in self.present()})

    def to(self, device: torch.device) -> Self:
        """Return the state on `device`: itself if it is there."""
        return self._moved(device.type, lambda block: to_device(block, device))

    def to_host(self) -> Self:
        """Return itself, or copies that are complete after the next `recorded_event` (device.py)."""
        return self._moved("cpu", to_host)

    def select(self, index: Tensor) -> Self:
        """Return copies of the rows `index` [n] int64."""
        present = dict(self.present())
        return type(self)(**dict(zip(present, gather_rows(list(present.values()), index), strict=True)))

    def store(self, index: Tensor, rows: DraftState) -> None:
        """Write `rows` at `index` [n] int64, which must be all different. Raises ValueError for unlike fields, shapes
        or dtypes."""
        ours, theirs = dict(self.present()), dict(rows.present())
        if ours.keys() != theirs.keys():
            raise ValueError(f"a draft state of {sorted(theirs)} does not fit one of {sorted(ours)}")
        for name, value in ours.items():
            if value.shape[1:] != theirs[name].shape[1:] or value.dtype != theirs[name].dtype:
                assign(value[: len(theirs[name])], theirs[name])  # raises, in words
        assign_rows_(list(ours.values()), index, [theirs[name] for name in ours])

    def _moved(self, device_type: str, copied: Callable[[Tensor], Tensor]) -> Self:
        """Return the state with all fields moved in one copy."""
        present = dict(self.present())
        values = list(present.values())
        if not values or values[0].device.type == device_type:
            return self
        return type(self)(**dict(zip(present, unpacked(copied(packed(values)), values), strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class RoundRows:
    """The sequences of a round as it begins, padding included; all on the engine's device."""

    lengths: Tensor  # [num_seqs] int64, L
    last_tokens: Tensor  # [num_seqs] int64, the bonus
    block_table: Tensor  # [num_seqs, num_columns] int64; columns that a round reaches beyond a row's pages name page 0
    sampling: SamplingBatch  # of the token at L + 1
    draft: DraftState
    proposed: Tensor | None = None  # [num_seqs, max_steps] int64, by a drafter that proposes on the host
    tail_table: Tensor | None = None  # as block_table, of tail pages; None: the target has none

    @property
    def was_drafted(self) -> bool:
        """Whether `propose` saw these rows: then the draft KV that it stored is there."""
        return True

    def after(self, targets: Tensor, num_accepted: Tensor) -> SamplingBatch:
        """Return the sampling of the token after t_a, given `targets` [num_seqs, K + 1], `num_accepted` [num_seqs]."""
        is_new = None
        if self.sampling.needs.penalizes:
            is_new = (counted(targets.shape[1], targets.device) <= num_accepted.unsqueeze(1)).unsqueeze(1)
        return self.sampling.ahead(num_accepted.unsqueeze(1) + 1, targets, is_new)


@dataclass(frozen=True, slots=True, eq=False)
class MissedRows(RoundRows):
    """Sequences as they were before rounds without drafts: nothing was proposed, and `sampling` is of the token that
    follows all those rounds."""

    @property
    def was_drafted(self) -> bool:
        return False

    def after(self, targets: Tensor, num_accepted: Tensor) -> SamplingBatch:
        return self.sampling


class Drafter(Protocol):
    """Proposes tokens in the target's vocabulary. One thread; tensors on the engine's device."""

    @property
    def shape(self) -> DraftShape:
        """The largest drafts of a round."""
        ...

    @property
    def hidden(self) -> HiddenLayout: ...

    @property
    def has_kv(self) -> bool:
        """Whether a round that skips `observe` leaves holes in its KV, which a later call must fill."""
        ...

    @property
    def proposer(self) -> HostProposer | None:
        """The part that proposes on the host, whose drafts `propose` gets as `RoundRows.proposed`; None: `propose`
        makes them on the device."""
        ...

    def use_pools(self, target: ModelPools, draft: ModelPools | None) -> None:
        """Read and write these pools from now on: the target's and the drafter's own, if it has one."""
        ...

    def allocate(self, num_rows: int) -> DraftState:
        """Return zeros for `num_rows` sequences."""
        ...

    def propose(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        """Return drafts of at least one step."""
        ...

    def observe(self, rows: RoundRows, hidden: Tensor | None, targets: Tensor, num_accepted: Tensor) -> DraftState:
        """Return the state for the next round, after a verify: `hidden` [num_seqs, K + 1, extend width] of the target
        and its tokens `targets` [num_seqs, K + 1] int64, both along the accepted path, and `num_accepted` [num_seqs]
        int64. With `MissedRows` it is called after `num_accepted` + 1 rounds without drafts."""
        ...

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: Tensor | None) -> None:
        """Store KV of prompt tokens that the target has computed: `hidden` [num_tokens, extend width], chunks end to
        end."""
        ...

    def finish_prompt(
        self, tails: Sequence[PromptTail], tokens: Tensor, hidden: Tensor | None, sampling: SamplingBatch
    ) -> DraftState:
        """Return the state after each prompt whose next token is sampled: `tokens` [num_tails] int64, the bonus tokens,
        which the host need not know; `hidden` [num_tails, extend width] of the last prompt positions; `sampling` of the
        tokens that follow. There may be zero tails."""
        ...


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens start .. stop - 1 of a prompt, computed by the target just now."""

    token_ids: Sequence[int]  # the whole prompt
    start: int
    stop: int
    pages: Sequence[int]
    tail: Sequence[int] | None = None  # as of `BatchRow`


@dataclass(frozen=True, slots=True)
class PromptTail:
    """A prompt that is computed."""

    token_ids: Sequence[int]  # all of it
    pages: Sequence[int]
    rows: Tensor | None = None  # [min(num_target_rows, prompt_len - 1), extend width], positions before the last
    tail: Sequence[int] | None = None  # as of `BatchRow`

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids)


# the fields of a metadata row that hold a `DraftState`, with which the first round of the decode node drafts
_FIELDS = {"tokens": "topk_index", "scores": "topk_score", "hidden": "recurrent_hidden", "rows": "target_rows"}


def set_draft(row: MetadataBuffers, draft: DraftState) -> None:
    """Write the state of one sequence into the fields that the schema has. A field without a value, or a value
    without a field, is our bug. Raises ValueError for a state of another width or dtype than the schema's: nothing is
    cut or cast."""
    values = dict(draft.present())
    for name, field in _FIELDS.items():
        value = values.get(name)
        assert (field in row) == (value is not None), (field, value)
        if value is not None:
            dtype = torch.int32 if name == "tokens" else value.dtype
            row.set(field, value.reshape(-1).to("cpu", dtype))


def pack_draft(schema: HandoffSchema, draft: DraftState) -> bytes:
    """Return a metadata row of one sequence with this draft state and no first token, in the bytes of the schema."""
    row = MetadataBuffers(schema)
    set_draft(row, draft)
    return row.pack()


def get_draft(row: MetadataBuffers, drafter: Drafter, token_ids: Sequence[int]) -> DraftState:
    """Return the state that `set_draft` wrote, one row on the CPU. `token_ids`: the whole sequence, the first generated
    token included."""
    draft = DraftState(**{name: torch.zeros_like(each, device="cpu") for name, each in drafter.allocate(1).present()})
    for name, value in draft.present():
        if name == "recent":
            known = torch.tensor(list(token_ids[-value.shape[1] :]))
            value[0, value.shape[1] - len(known) :] = known
        else:
            value.copy_(row.get(_FIELDS[name]).view(value.shape))
    return draft
