"""Copies between the pools of a node on CUDA and the slots of its host tier.

They go over a stream of their own, by way of a buffer on the device, in which the rows of a page lie as in its slot:

    store   pools --gather--> buffer --one copy per page--> slots
    load    slots --one copy per page--> buffer --scatter--> pools

The stream waits for the work that is submitted before a call, and later work waits for the stream. So a page is written
again only after it has been copied, and it is read only after it has been loaded. The host waits for nothing. Copies
ahead are the exception: their pages stay as they are, so later work does not wait for them until `await_ahead`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...metadata.handoff.memory import PageMemory
from .host_copies import slot_bytes
from .host_tier import TimedLoad
from .pinned_memory import SlotMemory

_BUFFER_BYTES = 64 << 20  # of pages that lie twice on the device


class _Part(NamedTuple):
    """The bytes of a slot that are of one pool."""

    pool: torch.Tensor  # [num_layers, num_pages, page_layer_words] int32
    first: int  # number of its first page
    words: slice


class _Kind(NamedTuple):
    """Slots of kept pages, or of tail pages."""

    parts: list[_Part]
    slots: torch.Tensor  # [num_slots, slot_words] int32, on the host
    buffer: torch.Tensor  # [most pages of a batch, slot_words] int32, on the device


class _LoadUnderWay(NamedTuple):
    num_pages: int
    begun: torch.cuda.Event
    done: torch.cuda.Event


class CudaCopies:
    """Slots in pinned memory. `kvs` are the pools, [num_layers, num_pages, page_layer_bytes] uint8 each; `memory` has
    their layouts and first pages. A `PageCopies`."""

    def __init__(
        self,
        kvs: Sequence[torch.Tensor],
        memory: Sequence[PageMemory],
        num_slots: int,
        num_tail_slots: int = 0,
        *,
        is_shared: bool = False,
    ) -> None:
        """`is_shared`: other processes may map the slots, at `places`."""
        self.num_slots, self.num_tail_slots = num_slots, num_tail_slots
        self._device = kvs[0].device
        self._stream = torch.cuda.Stream(self._device)
        pools = list(zip(kvs, memory, strict=True))
        kept, tails = [each for each in pools if not each[1].first], [each for each in pools if each[1].first]
        slots = [
            SlotMemory(num, slot_bytes([each for _, each in own]), is_pinned=True, is_shared=is_shared)
            for num, own in ((num_slots, kept), (num_tail_slots, tails))
        ]
        self.places = (slots[0].where, slots[1].where)
        self._kept, self._tails = self._kind(kept, slots[0].slots), self._kind(tails, slots[1].slots)
        self._loads: deque[_LoadUnderWay] = deque()
        self._ahead: torch.cuda.Event | None = None  # of the last copies ahead; None: all work waits for them

    @property
    def num_ahead(self) -> int:
        """Pages of one batch: the next ones wait in the buffer's way."""
        return len(self._kept.buffer)

    @property
    def is_settled(self) -> bool:
        return all(load.done.query() for load in self._loads)

    def store(self, pages: Sequence[int], slots: Sequence[int], *, is_ahead: bool = False) -> None:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream), torch.inference_mode():
                for kind, rows, own in self._batches(slots, pages):
                    for part in kind.parts:
                        copied = part.pool.index_select(1, self._on_device(own, part.first))
                        kind.buffer[: len(own), part.words] = copied.transpose(0, 1).flatten(1)
                    for place, row in enumerate(rows):
                        kind.slots[row].copy_(kind.buffer[place], non_blocking=True)
                if is_ahead:
                    self._ahead = torch.cuda.Event()
                    self._ahead.record(self._stream)
            if not is_ahead:
                current.wait_stream(self._stream)

    def await_ahead(self) -> None:
        if self._ahead is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ahead)
            self._ahead = None

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            load = _LoadUnderWay(len(pages), _timer(), _timer())
            with torch.cuda.stream(self._stream), torch.inference_mode():
                load.begun.record(self._stream)
                for kind, rows, own in self._batches(slots, pages):
                    for place, row in enumerate(rows):
                        kind.buffer[place].copy_(kind.slots[row], non_blocking=True)
                    for part in kind.parts:
                        copied = kind.buffer[: len(own), part.words].unflatten(1, (part.pool.shape[0], -1))
                        part.pool.index_copy_(1, self._on_device(own, part.first), copied.transpose(0, 1))
                load.done.record(self._stream)
            current.wait_stream(self._stream)
            self._loads.append(load)

    def rows(self, slot: int) -> list[np.ndarray]:
        kind, first = (self._kept, 0) if slot < self.num_slots else (self._tails, self.num_slots)
        return [kind.slots[slot - first].numpy().view(np.uint8)]

    def fence(self) -> Callable[[], object]:
        done = torch.cuda.Event()
        done.record(self._stream)
        return done.synchronize

    def take_loads(self) -> list[TimedLoad]:
        done: list[TimedLoad] = []
        while self._loads and self._loads[0].done.query():
            load = self._loads.popleft()
            done.append(TimedLoad(load.num_pages, load.begun.elapsed_time(load.done) / 1000))
        return done

    def _kind(self, pools: Sequence[tuple[torch.Tensor, PageMemory]], slots: np.ndarray) -> _Kind:
        num_slots, size = slots.shape
        parts: list[_Part] = []
        offset = 0
        for kv, memory in pools:
            assert kv.shape == memory.pages.shape and kv.dtype == torch.uint8, (kv.shape, memory.pages.shape)
            assert memory.layout.page_layer_bytes % 4 == 0, (memory.layout, "blocks on a GPU are words of 4 bytes")
            end = offset + memory.page_bytes // 4
            parts.append(_Part(kv.view(torch.int32), memory.first, slice(offset, end)))
            offset = end
        words = slots.reshape(-1).view(np.int32)  # torch has no such view of no bytes
        most = min(num_slots, max(1, _BUFFER_BYTES // max(1, size)))
        buffer = torch.empty((most, offset), dtype=torch.int32, device=self._device)
        return _Kind(parts, torch.from_numpy(words.reshape(num_slots, offset)), buffer)

    def _batches(
        self, slots: Sequence[int], pages: Sequence[int]
    ) -> Iterator[tuple[_Kind, Sequence[int], Sequence[int]]]:
        """Yield as many slots, by their rows, and pages as the buffer holds."""
        is_tail = slots[0] >= self.num_slots
        kind, first = (self._tails, self.num_slots) if is_tail else (self._kept, 0)
        most = len(kind.buffer)
        for start in range(0, len(slots), most):
            yield kind, [slot - first for slot in slots[start : start + most]], pages[start : start + most]

    def _on_device(self, pages: Sequence[int], first: int) -> torch.Tensor:
        """Return the pages' places in a pool, int64 [num_pages]."""
        return torch.from_numpy(np.asarray(pages, np.int64) - first).to(self._device)


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
