"""Durations of a request's stages on a node, in seconds. Clock times are not sent, because the clocks of hosts differ.

Lists are bounded. When a list is full, `add_bounded` adds up neighbours, so that sums stay right at any length.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from .request import Count, Preemption, Seconds

MAX_CHUNKS = 16


class ChunkTimes(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One chunk of a prompt, or the sum of several in a row."""

    num_chunks: Count
    num_tokens: Count
    waited_s: Seconds  # since the chunk before, or the start, while pages were offered and other prompts computed
    compute_s: Seconds  # of the whole step, which may hold chunks of other prompts


class PrefillTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Times that PrefillDone carries besides its own. `sample_s` lasts from the end of the prompt's computation to the
    message with the first tokens."""

    sample_s: Seconds = 0.0
    num_offers: Count = 0
    early_pages: Count = 0  # offered before all chunks were computed
    chunks: Annotated[tuple[ChunkTimes, ...], Meta(max_length=MAX_CHUNKS)] = ()


class PullTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Times that Admitted carries besides its own."""

    transport: Annotated[str, Meta(max_length=128)] = ""
    last_s: Seconds = 0.0  # from the arrival of the last offer to the check of the last page
    admit_s: Seconds = 0.0  # from that check until the first round is submitted
    num_repeated: Count = 0  # pages pulled again because of a wrong checksum


_Summed = TypeVar("_Summed", ChunkTimes, Preemption)


def add_bounded(items: list[_Summed], item: _Summed, most: int) -> None:
    """Append an item. A list of `most` items is first halved by adding up each two neighbours."""
    if len(items) >= most:
        items[:] = [_sum(*items[index : index + 2]) for index in range(0, len(items), 2)]
    items.append(item)


def _sum(first: _Summed, *others: _Summed) -> _Summed:
    rows = [msgspec.structs.astuple(item) for item in (first, *others)]
    return type(first)(*map(sum, zip(*rows, strict=True)))
