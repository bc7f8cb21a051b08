"""What the handoff asks of KV pools on a GPU. Nothing here imports torch: engine/cuda_pool.py is one, for CUDA.

The pools of a node on a GPU lie in device memory; its `PageMemory` is a host mirror with the same page numbers, where
pages lie only while they travel by way of the host. Page numbers name pages of all pools, target and draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Shared(NamedTuple):
    """A pool's memory on a GPU: a file descriptor of it, which its owner keeps open, and its size in bytes."""

    descriptor: int
    size: int


class Gather(Protocol):
    """Pages on their way into our pools."""

    @property
    def is_done(self) -> bool:
        """Whether all pages have been copied, and digested where they lie now. Does not wait."""
        ...

    def wait(self) -> None:
        """Returns when it is done."""
        ...

    def checksums(self) -> list[bytes]:
        """Of each page, as an Offer has them; empty where the schema has none. To be asked when it is done."""
        ...


class MappedPools(Protocol):
    """A peer's pools, readable from our device."""

    def close(self) -> None:
        """Unmaps, after all gathers from them are done."""
        ...


class DevicePool(Protocol):
    """The pools of this node on its GPU. Used by the node's thread alone."""

    @property
    def device(self) -> str:
        """Which GPU, by its UUID."""
        ...

    @property
    def shared(self) -> tuple[Shared, ...]:
        """Return what other processes of this host map the pools by, one for each pool; empty if they cannot."""
        ...

    def map(self, descriptors: Sequence[int], sizes: Sequence[int], num_pages: int) -> MappedPools:
        """Map a peer's pools of `num_pages` pages so that they can be read and not written. The caller closes the
        descriptors. Raises TransferError, with nothing left mapped, when that cannot be."""
        ...

    def expect(self, pages: Sequence[int]) -> None:
        """These pages of ours will be written by `gather` or `load`, not before what was submitted so far is done: it
        may still use them."""
        ...

    def gather(self, peer: MappedPools, sources: Sequence[int], targets: Sequence[int]) -> Gather:
        """Begins to copy pages of the peer's into ours."""
        ...

    def digest(self, pages: Sequence[int]) -> list[bytes]:
        """Checksums of complete pages of ours, as `Gather.checksums`. Waits for nothing else that the device does."""
        ...

    def store(self, pages: Sequence[int]) -> None:
        """Copies complete pages into the host mirror; waits for the copy, for nothing else."""
        ...

    def load(self, pages: Sequence[int]) -> list[bytes]:
        """Copies pages from the host mirror into the pools; returns their checksums there."""
        ...
