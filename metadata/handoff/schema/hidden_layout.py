"""Width and dtype of hidden states, per phase. No other module decides them.

Every producer asks `HiddenLayout`: live tensors, idle (zero-row) inputs, static graph buffers, metadata rows, relays.

    extend      rows that the target hands to the draft's extend pass
    recurrent   rows that the draft hands from step to step, and the prefill node hands to the decode node

The rows of a phase come from one of four sources:

    handoff     the state that the target's family hands to drafters; with hyper-connection streams, all streams
    final       the target's state after its last norm, which its output matrix takes; streams are collapsed
    aux         `num_aux` states of chosen target layers side by side; streams are collapsed
    draft       the draft's own state; with streams of its own, all of them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ...errors import ConfigError

Phase = Literal["extend", "recurrent"]
Source = Literal["handoff", "final", "aux", "draft"]
HiddenDtype = Literal["float32", "bfloat16", "float16"]

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
}


class HiddenSpec(NamedTuple):
    """Width (elements per row) and dtype of one phase's hidden state."""

    width: int
    dtype: HiddenDtype


def spec_hidden_size(hidden_size: int, hc_mult: int | None) -> int:
    """Return the width of a hidden state with hyper-connection streams: hidden_size * hc_mult if `hc_mult` is above 1,
    else hidden_size."""
    return hidden_size * hc_mult if hc_mult is not None and hc_mult > 1 else hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenLayout:
    """Hidden states of one (target, draft, algorithm), from plain numbers.

    The drafter says where the rows of each phase come from (`extend`, `recurrent`; None: there are none); the layout
    answers how wide they are. `hands_over_collapsed`: the target family has streams but hands over the collapsed state.
    `num_target_rows`: how many of the target's last rows travel with the metadata row. Raises ConfigError if a source
    lacks a size that it needs.
    """

    algorithm: str
    target_hidden_size: int
    extend: Source | None = None
    recurrent: Source | None = None
    num_target_rows: int = 0
    target_dtype: HiddenDtype = "float32"
    hc_mult: int | None = None
    hands_over_collapsed: bool = False
    draft_hidden_size: int = 0
    draft_dtype: HiddenDtype = "float32"
    draft_hc_mult: int | None = None
    num_aux: int = 0

    def __post_init__(self) -> None:
        sources = (self.extend, self.recurrent)
        if "aux" in sources and self.num_aux < 1:
            raise ConfigError(
                f"{self.algorithm} needs auxiliary target rows, num_aux is {self.num_aux}; it must be 1 or more"
            )
        if "draft" in sources and self.draft_hidden_size < 1:
            raise ConfigError(
                f"{self.algorithm} needs the draft's hidden size, it is {self.draft_hidden_size}; it must be 1 or more"
            )

    def spec(self, phase: Phase) -> HiddenSpec | None:
        """Return width and dtype of the phase's rows; None if the algorithm has no such state."""
        return self._extend() if phase == "extend" else self._recurrent()

    def allocate(self, phase: Phase, num_rows: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Return zeros, [num_rows, width]; None if the phase has no state. An idle input has `num_rows` 0."""
        spec = self.spec(phase)
        if spec is None:
            return None
        return torch.zeros(num_rows, spec.width, dtype=TORCH_DTYPES[spec.dtype], device=device)

    def check(self, phase: Phase, rows: torch.Tensor) -> None:
        """Raise ValueError unless `rows` is [num_rows, width] in the phase's width and dtype, zero rows included."""
        spec = self.spec(phase)
        if spec is None or rows.ndim != 2 or (rows.shape[1], rows.dtype) != (spec.width, TORCH_DTYPES[spec.dtype]):
            wanted = "none" if spec is None else f"[num_rows, {spec.width}] {spec.dtype}"
            raise ValueError(f"{phase} state of {self.algorithm} is {wanted}, not {tuple(rows.shape)} {rows.dtype}")

    def to_draft(self, rows: torch.Tensor) -> torch.Tensor:
        """Return extend rows in the draft's dtype. Nothing else casts a state that goes from target to draft. Rows that
        have the dtype are returned as they are."""
        return rows.to(TORCH_DTYPES[self.draft_dtype])

    def _extend(self) -> HiddenSpec | None:
        return self._from(self.extend)

    def _recurrent(self) -> HiddenSpec | None:
        return self._from(self.recurrent)

    def _from(self, source: Source | None) -> HiddenSpec | None:
        match source:
            case None:
                return None
            case "handoff":
                hc_mult = None if self.hands_over_collapsed else self.hc_mult
                return HiddenSpec(spec_hidden_size(self.target_hidden_size, hc_mult), self.target_dtype)
            case "final":
                return HiddenSpec(self.target_hidden_size, self.target_dtype)
            case "aux":
                return HiddenSpec(self.num_aux * self.target_hidden_size, self.target_dtype)
            case "draft":
                return HiddenSpec(spec_hidden_size(self.draft_hidden_size, self.draft_hc_mult), self.draft_dtype)


def assign(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy `src` into `dst`. Raises ValueError if shape or dtype differ: nothing is broadcast or cast."""
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise ValueError(
            f"hidden state of {tuple(src.shape)} {src.dtype} does not fit a buffer of {tuple(dst.shape)} {dst.dtype}"
        )
    dst.copy_(src)
