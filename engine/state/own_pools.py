"""The KV pools of ranks with sequences of their own, on CPUs: one memory for each pool, of which a rank has a part.

    page p of rank r, on data links:   r * num_pages + p

    a layer of the memory    | pages of rank 0 | pages of rank 1 | ...
                                      ^                 ^
                             rank 0 maps all      rank 1 maps all, and works on its part

Rank 0 makes the memory, and all ranks map it. So the handoff of rank 0 serves and pulls the pages of all ranks. Every
work that writes pages has ended on all ranks when rank 0 goes on (own_work_executor.py). Therefore rank 0 may read and
write the pages of any rank between two works.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...metadata.errors import ConfigError
from ...metadata.handoff.memory import PageMemory, memory_size
from ...metadata.handoff.schema.kv_layout import KvLayout
from ..ranks.ranks import Ranks


class OwnPages(NamedTuple):
    """The pages of this rank in one pool: `pages` uint8 [num_layers, num_pages, page_layer_bytes]. A layer is
    contiguous, the pool is not."""

    layout: KvLayout
    pages: np.ndarray


def share_pools(ranks: Ranks, layouts: Sequence[KvLayout], num_pages: int) -> tuple[list[OwnPages], list[PageMemory]]:
    """Return this rank's pages of each pool, and the memories of all ranks' pages, which only rank 0 gets and closes.

    `num_pages`: of one rank. All ranks must call it. Raises ConfigError if the machine does not have that much memory,
    or no memory that processes share."""
    rank, num_all = ranks.group.rank, ranks.num_pools * num_pages
    own, memories = list[OwnPages](), list[PageMemory]()
    for layout in layouts:
        if rank == 0:
            memories.append(_made(ranks, layout, num_all))
            pages = memories[-1].pages
        else:
            pages = _mapped(ranks, layout, num_all)
        own.append(OwnPages(layout, pages[:, rank * num_pages : (rank + 1) * num_pages]))
    return own, memories


def _made(ranks: Ranks, layout: KvLayout, num_all: int) -> PageMemory:
    """Make the memory of a pool, and wait until the other ranks have mapped it."""

    def share(descriptor: int) -> None:
        ranks.gather_numbers([os.getpid(), descriptor])
        ranks.meet()

    memory = PageMemory(layout, num_all, before_seal=share)
    if not memory.is_shared:
        raise ConfigError("this system has no memory that processes share, which ranks need; use --dp-attention 1")
    return memory


def _mapped(ranks: Ranks, layout: KvLayout, num_all: int) -> np.ndarray:
    """Map the memory that rank 0 has made: uint8 [num_layers, num_all, page_layer_bytes]."""
    pid, descriptor = ranks.gather_numbers([0, 0])[0]
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(opened, memory_size(layout, num_all))
    finally:
        os.close(opened)
    ranks.meet()
    flat = np.frombuffer(mapped, np.uint8, num_all * layout.page_bytes)
    return flat.reshape(layout.num_layers, num_all, layout.page_layer_bytes)
