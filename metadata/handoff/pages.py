"""Pages as the two ends of a handoff see them, whether the pools lie in host memory or on a GPU.

In host memory a pool and its `PageMemory` are one. On a GPU checksums are computed on the device, and a page comes to
the host (`DevicePool.store`, `load`) only for a link whose transport moves it by way of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..wire.node_info import HandoffSchema
from .checksums import first_difference, page_checksums
from .device_pool import DevicePool
from .memory import PageMemory
from .schema import GPU_CHECKSUM, blocks_per_page
from .transports.base import Landed
from .transports.zmq import pack_pages


class OfferedPages:
    """Prefill's end: what is known of pages that were offered. It is kept until the page is allocated again."""

    def __init__(self, schema: HandoffSchema, memory: Sequence[PageMemory], device: DevicePool | None) -> None:
        _check_digest(schema, device)
        self._has_checksums = blocks_per_page(schema) > 0
        self._memory, self._device = tuple(memory), device
        self._known: dict[int, tuple[int, bytes]] = {}  # by page: its generation, its checksums
        self._on_host: dict[int, int] = {}  # by page: the generation that lies in the mirror

    def checksums(self, pages: Sequence[int], generations: Sequence[int]) -> list[bytes]:
        """Checksums of each of these computed pages. On a GPU those not known yet are computed together."""
        ages = dict(zip(pages, generations, strict=True))
        new = [page for page, age in ages.items() if self._known.get(page, (None,))[0] != age]
        if new:
            digests = self._digest(new)
            self._known |= {page: (ages[page], digest) for page, digest in zip(new, digests, strict=True)}
        return [self._known[page][1] for page in pages]

    def bring(self, pages: Sequence[int]) -> None:
        """Pages that `checksums` was asked for lie in `memory` from now on."""
        if self._device is None:
            return
        generations = self._memory[0].generations
        new = [page for page in dict.fromkeys(pages) if self._on_host.get(page) != int(generations[page])]
        if new:
            self._device.store(new)
            self._on_host |= {page: int(generations[page]) for page in new}

    def pack(self, pages: Sequence[int]) -> tuple[np.ndarray, bytes]:
        """The pages as one frame for `Pages`, and their generations after they were copied, int64 [num_pages]. From a
        GPU they are copied anew each time: what is asked for again may have been damaged on the way."""
        if self._device is not None:
            self._device.store(pages)
        frame = pack_pages(self._memory, pages)
        return frame, self._memory[0].generations[list(pages)].astype("<i8").tobytes()

    def _digest(self, pages: Sequence[int]) -> list[bytes]:
        if self._device is not None:
            return self._device.digest(pages)
        return [page_checksums(self._memory, page) if self._has_checksums else b"" for page in pages]


class ReceivedPages:
    """Decode's end: pages are checked in the pools that rounds read."""

    def __init__(self, schema: HandoffSchema, memory: Sequence[PageMemory], device: DevicePool | None) -> None:
        _check_digest(schema, device)
        self._has_checksums = blocks_per_page(schema) > 0
        self._memory, self._device = tuple(memory), device

    def expect(self, pages: Sequence[int]) -> None:
        """These pages of ours are a transfer's from now on."""
        if self._device is not None:
            self._device.expect(pages)

    def first_difference(self, landed: Landed, offered: bytes) -> int | None:
        """The page lies in our pool when this returns. Index of its first block whose checksum is not the offered one;
        None when all agree, or there are none."""
        page, ours = landed.move.target, landed.checksums
        if ours is None and self._device is not None:
            [ours] = self._device.load([page])
        elif ours is None and self._has_checksums:
            ours = page_checksums(self._memory, page)
        return first_difference(ours, offered) if self._has_checksums and ours is not None else None


def _check_digest(schema: HandoffSchema, device: DevicePool | None) -> None:
    assert schema.checksum == "none" or (schema.checksum == GPU_CHECKSUM) == (device is not None), schema.checksum
