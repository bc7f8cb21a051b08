"""Metadata rows: the values that the prefill node hands over to the decode node besides the pages of a prompt.

A row holds, for one choice of a prompt, the fields that the schema declares. The prefill node fills its
MetadataBuffers, packs them, and sends the row in the final Offer. The decode node unpacks it into MetadataBuffers of
its own, and reads the first token and the drafter's state from there.

    field             writer       reader       width (elements)
    first_token       set_sampled  get_sampled  1
    num_cached        set_sampled  get_sampled  1
    num_logprobs      set_sampled  get_sampled  1
    logprobs          set_sampled  get_sampled  1 + MAX_TOP_LOGPROBS
    top_ids           set_sampled  get_sampled  MAX_TOP_LOGPROBS
    topk_index        set_draft    get_draft    draft_topk * draft_rows
    topk_score        set_draft    get_draft    draft_topk * draft_rows
    recurrent_hidden  set_draft    get_draft    hidden.spec("recurrent").width
    target_rows       set_draft    get_draft    hidden.num_target_rows * hidden.spec("extend").width

`set_sampled` and `get_sampled` are methods here: the prefill node calls the one, the decode node the other. `set_draft`
and `get_draft` (engine/drafters/base.py) copy a drafter's state into the row of the prefill node, and out of the row
of the decode node. `hidden` is the HiddenLayout of target and draft. schema.py says what each field means (ROW_KINDS).

Every schema has the first five fields. A drafter adds the others that it needs (schema.py: `_draft_fields`).

`spec_hidden_size` (hidden_layout.py) is hidden_size * hc_mult for a model with hyper-connection streams, else
hidden_size. It sizes the two fields of hidden states. With EAGLE, EAGLE-3 and chained MTP, recurrent_hidden
has the draft's spec_hidden_size; with FROZEN_KV_MTP it has the target's hidden_size. With MTP of several layers,
target_rows has the target's spec_hidden_size per row instead. STANDALONE, NGRAM and plain decoding hand over no hidden
state, so their rows have no such field and no such bytes.

Allocation, offsets, set, get, pack and unpack are loops over `HandoffSchema.row`. A field that the schema does
not declare takes no bytes; asking for it raises KeyError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...errors import ProtocolError
from ...wire.node_info import HandoffSchema, RowField
from ...wire.request import MAX_TOP_LOGPROBS, TokenLogprobs
from .hidden_layout import TORCH_DTYPES, assign
from .schema import row_bytes


class Sampled(NamedTuple):
    """The values of the fields that every schema has."""

    first_token: int
    num_cached: int  # prompt tokens found in prefill's prefix cache
    logprobs: TokenLogprobs | None


class MetadataBuffers:
    """A row in host memory, one tensor [width] per declared field."""

    def __init__(self, schema: HandoffSchema) -> None:
        self.row_bytes = row_bytes(schema)
        self._fields: dict[str, RowField] = {field.name: field for field in schema.row}
        self._tensors = {field.name: torch.zeros(field.width, dtype=TORCH_DTYPES[field.dtype]) for field in schema.row}
        # The same memory for numpy, which reads and writes a few numbers in a tenth of torch's time.
        self._bytes = {name: each.view(torch.uint8).numpy() for name, each in self._tensors.items()}
        self._ids = {name: each.numpy() for name, each in self._tensors.items() if each.dtype == torch.int32}

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str) -> torch.Tensor:
        """Return a field, [width], the row's own memory. Raises KeyError if the schema has no such field."""
        return self._tensors[name]

    def set(self, name: str, values: torch.Tensor | Sequence[float]) -> None:
        """Write a field: a tensor [width] of the declared dtype, or `width` numbers.

        Raises KeyError if the schema has no such field, and ValueError if width or dtype differ: nothing is cut or
        cast.
        """
        dst = self.get(name)
        src = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dst.dtype)
        try:
            assign(dst, src)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def pack(self) -> bytes:
        """Return the row's fields without gaps, in declared order, in the bytes of their dtypes."""
        return b"".join(each.tobytes() for each in self._bytes.values())

    def unpack(self, data: bytes) -> None:
        """Write the bytes of `pack` into the row. Raises ProtocolError if the length is not that of the schema."""
        if len(data) != self.row_bytes:
            raise ProtocolError(f"a metadata row of {len(data)} bytes, but the schema's row has {self.row_bytes}")
        at = 0
        for each in self._bytes.values():
            size = each.shape[0]
            each[:] = np.frombuffer(data, np.uint8, size, at)
            at += size

    def set_sampled(self, sampled: Sampled) -> None:
        """Write the fields that every schema has. At most MAX_TOP_LOGPROBS top tokens."""
        for name, number in (("first_token", sampled.first_token), ("num_cached", sampled.num_cached)):
            self._ids[name][0] = number
        values, top_ids = self._tensors["logprobs"].numpy(), self._ids["top_ids"]
        values[:], top_ids[:], num_logprobs = 0.0, 0, 0
        if sampled.logprobs is not None:
            num_top = len(sampled.logprobs.top_ids)
            num_logprobs = 1 + num_top
            values[:num_logprobs] = [sampled.logprobs.logprob, *sampled.logprobs.top_logprobs]
            top_ids[:num_top] = sampled.logprobs.top_ids
        self._ids["num_logprobs"][0] = num_logprobs

    def get_sampled(self, vocab_size: int) -> Sampled:
        """Return what `set_sampled` wrote. Raises ProtocolError if a peer's row holds impossible counts, or a token or
        a proposal of the drafter outside the vocabulary."""
        first_token, num_cached, num_logprobs = (
            int(self._ids[name][0]) for name in ("first_token", "num_cached", "num_logprobs")
        )
        self._check_ids(vocab_size)
        if not 0 <= num_logprobs <= 1 + MAX_TOP_LOGPROBS or num_cached < 0:
            raise ProtocolError(
                f"a metadata row with first_token {first_token}, num_cached {num_cached}, num_logprobs {num_logprobs}"
            )
        if num_logprobs == 0:
            return Sampled(first_token, num_cached, None)
        values: list[float] = self._tensors["logprobs"][:num_logprobs].numpy().tolist()
        top_ids: list[int] = self._ids["top_ids"][: num_logprobs - 1].tolist()
        return Sampled(first_token, num_cached, TokenLogprobs(values[0], tuple(top_ids), tuple(values[1:])))

    def _check_ids(self, vocab_size: int) -> None:
        for name in ("first_token", "top_ids", "topk_index"):
            if name in self:
                ids = self._ids[name]
                low, high = int(ids.min()), int(ids.max())
                if low < 0 or high >= vocab_size:
                    raise ProtocolError(
                        f"a metadata row whose {name} has ids {low} to {high}, of a vocabulary of {vocab_size}"
                    )
