"""What nodes tell of a request's time, as durations in seconds: the clocks of two hosts do not compare.

Lists are bounded: `add_bounded` joins neighbours when one is full, so that sums stay right whatever the length.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from .request import Count, Preemption, Seconds

MAX_CHUNKS = 16


class ChunkTimes(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One chunk of a prompt, or several in a row."""

    num_chunks: Count
    num_tokens: Count
    waited_s: Seconds  # since the chunk before, or the start: pages were offered, other prompts had their turn
    compute_s: Seconds  # of the whole step, which other prompts may share


class PrefillTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Beside PrefillDone's own figures. `sample_s`: from the computed prompt to the first tokens' message."""

    sample_s: Seconds = 0.0
    num_offers: Count = 0
    early_pages: Count = 0  # offered while later chunks were still to be computed
    chunks: Annotated[tuple[ChunkTimes, ...], Meta(max_length=MAX_CHUNKS)] = ()


class PullTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Beside Admitted's own figures."""

    transport: Annotated[str, Meta(max_length=128)] = ""
    last_s: Seconds = 0.0  # from taking the last offer to the last page checked
    admit_s: Seconds = 0.0  # from then to running
    num_repeated: Count = 0  # pages pulled again for a wrong checksum


_Summed = TypeVar("_Summed", ChunkTimes, Preemption)


def add_bounded(items: list[_Summed], item: _Summed, most: int) -> None:
    """Appends; a list of `most` items is first halved by adding each two neighbours up."""
    if len(items) >= most:
        items[:] = [_sum(*items[place : place + 2]) for place in range(0, len(items), 2)]
    items.append(item)


def _sum(first: _Summed, *others: _Summed) -> _Summed:
    rows = [msgspec.structs.astuple(item) for item in (first, *others)]
    return type(first)(*map(sum, zip(*rows, strict=True)))
