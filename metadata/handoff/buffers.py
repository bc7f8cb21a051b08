"""Metadata rows: what prefill tells decode beside the pages, packed and unpacked as the schema declares.

Allocation, offsets, set, get, pack, unpack and clear are loops over `HandoffSchema.row`; a field that is not declared
takes no bytes and is a KeyError. Prefill packs a row into the final Offer; decode unpacks it where its state lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import ProtocolError
from ..wire.node_info import HandoffSchema, RowField
from ..wire.request import MAX_TOP_LOGPROBS, TokenLogprobs
from .hidden_layout import TORCH_DTYPES, assign
from .schema import row_bytes


class Sampled(NamedTuple):
    """The fields that every schema has."""

    first_token: int
    num_cached: int  # prompt tokens found in prefill's prefix cache
    logprobs: TokenLogprobs | None


class MetadataBuffers:
    """A pool of rows on one device, one tensor [num_rows, width] a declared field."""

    def __init__(self, schema: HandoffSchema, num_rows: int = 1, device: torch.device | str = "cpu") -> None:
        self.num_rows = num_rows
        self.row_bytes = row_bytes(schema)
        self._fields: dict[str, RowField] = {field.name: field for field in schema.row}
        self._tensors = {
            field.name: torch.zeros(num_rows, field.width, dtype=TORCH_DTYPES[field.dtype], device=device)
            for field in schema.row
        }

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    @property
    def num_bytes(self) -> int:
        """Bytes the rows take on the device."""
        return self.num_rows * self.row_bytes

    def tensor(self, name: str) -> torch.Tensor:
        """All rows of a field, [num_rows, width]. KeyError when the schema has no such field."""
        return self._tensors[name]

    def get(self, name: str, row: int = 0) -> torch.Tensor:
        """A field of one row, a view [width]. KeyError when the schema has no such field."""
        return self._tensors[name][row]

    def set(self, name: str, values: torch.Tensor | Sequence[float], row: int = 0) -> None:
        """Writes a field of one row: a tensor [width] of the declared dtype, or `width` numbers.

        KeyError when the schema has no such field; ValueError for another width or dtype: nothing is cut or cast.
        """
        dst = self.get(name, row)
        src = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dst.dtype)
        try:
            assign(dst, src)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def clear(self, row: int = 0) -> None:
        """Zeroes one row."""
        for tensor in self._tensors.values():
            tensor[row].zero_()

    def pack(self, row: int = 0) -> bytes:
        """One row's fields without gaps, in declared order, in the bytes of their dtypes."""
        return b"".join(
            tensor[row].cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in self._tensors.values()
        )

    def unpack(self, data: bytes, row: int = 0) -> None:
        """The inverse of `pack`. Raises ProtocolError when the length is not the schema's."""
        if len(data) != self.row_bytes:
            raise ProtocolError(f"a metadata row of {len(data)} bytes, the schema's has {self.row_bytes}")
        at = 0
        for tensor in self._tensors.values():
            size = tensor.shape[1] * tensor.element_size()
            source = torch.frombuffer(bytearray(data[at : at + size]), dtype=tensor.dtype)
            tensor[row].copy_(source)
            at += size

    def set_sampled(self, sampled: Sampled, row: int = 0) -> None:
        """Writes the fields that every schema has. At most MAX_TOP_LOGPROBS top tokens."""
        logprobs, top_ids, num_logprobs = [0.0] * (1 + MAX_TOP_LOGPROBS), [0] * MAX_TOP_LOGPROBS, 0
        if sampled.logprobs is not None:
            num_top = len(sampled.logprobs.top_ids)
            num_logprobs = 1 + num_top
            logprobs[:num_logprobs] = [sampled.logprobs.logprob, *sampled.logprobs.top_logprobs]
            top_ids[:num_top] = sampled.logprobs.top_ids
        self.set("first_token", [sampled.first_token], row)
        self.set("num_cached", [sampled.num_cached], row)
        self.set("num_logprobs", [num_logprobs], row)
        self.set("logprobs", logprobs, row)
        self.set("top_ids", top_ids, row)

    def get_sampled(self, vocab_size: int, row: int = 0) -> Sampled:
        """Reads what `set_sampled` wrote. Raises ProtocolError where a peer's row cannot be, and where it names a token
        or a drafter's proposal outside the vocabulary, with which no embedding could begin."""
        num_logprobs = int(self.get("num_logprobs", row))
        first_token, num_cached = int(self.get("first_token", row)), int(self.get("num_cached", row))
        self._check_ids(vocab_size, row)
        if not 0 <= num_logprobs <= 1 + MAX_TOP_LOGPROBS or num_cached < 0:
            raise ProtocolError(
                f"a metadata row with first_token {first_token}, num_cached {num_cached}, num_logprobs {num_logprobs}"
            )
        if num_logprobs == 0:
            return Sampled(first_token, num_cached, None)
        values: list[float] = self.get("logprobs", row)[:num_logprobs].cpu().numpy().tolist()
        top_ids: list[int] = self.get("top_ids", row)[: num_logprobs - 1].cpu().numpy().tolist()
        return Sampled(first_token, num_cached, TokenLogprobs(values[0], tuple(top_ids), tuple(values[1:])))

    def _check_ids(self, vocab_size: int, row: int) -> None:
        for name in ("first_token", "top_ids", "topk_index"):
            if name in self:
                ids = self.get(name, row)
                low, high = int(ids.min()), int(ids.max())
                if low < 0 or high >= vocab_size:
                    raise ProtocolError(f"a metadata row whose {name} has {low} to {high} of {vocab_size} tokens")
