"""One block of device memory per rank of a node, which all ranks map (kernels/ranks/all_reduce.py).

    rank i: own block --descriptor over a Unix socket--> every other rank: Mapping, for reading and writing

The ranks may be on different GPUs, which must reach each other's memory, or on one. A rank that ends frees nothing that
another rank maps.
"""

from __future__ import annotations

import contextlib
import os

import torch

from ...kernels.ranks.all_reduce import BLOCK_BYTES, CONTROL, PeerBlocks
from ...metadata.handoff.descriptor_inbox import TOKEN_LEN, DescriptorInbox, new_token, send_descriptors
from ..ranks.group import Group
from .cuda_memory import Mapping, map_shared, share, shareable_zeros


class MappedBlocks:
    """Owns this rank's block and the mappings of the others. The owner calls `close`."""

    def __init__(self, host: Group, device: torch.device, limit_s: float) -> None:
        """Meet the ranks of `host`, which must all call it; each is a process of this host with one `device`. A kernel
        waits at most `limit_s` seconds for another rank.

        Raises TransferError if the devices do not map each other's memory, RuntimeError if a rank is gone."""
        own = shareable_zeros((BLOCK_BYTES,), torch.uint8, device)
        torch.cuda.synchronize(device)  # from now on other ranks write flags here
        self._mappings: dict[int, Mapping] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self._unmap)
            _map_others(host, own, self._mappings)
            undo.pop_all()
        places = [self._mappings[rank].address if rank != host.rank else own.data_ptr() for rank in range(host.size)]
        control = pinned_zeros(len(CONTROL))
        control[CONTROL.limit] = int(limit_s * 1e9)
        self._device = device
        self.blocks = PeerBlocks(host.rank, torch.tensor(places, device=device), own, control)

    def close(self) -> None:
        """Unmap the blocks of the other ranks. Kernels that wait for another rank end at once. May be called twice."""
        self.blocks.control[CONTROL.has_failed] = 1
        torch.cuda.synchronize(self._device)
        self._unmap()

    def _unmap(self) -> None:
        for mapping in self._mappings.values():
            mapping.close()


def pinned_zeros(count: int) -> torch.Tensor:
    """Return zeros [count] int64 in host memory that the GPU reads and writes."""
    return torch.zeros(count, dtype=torch.int64, pin_memory=True)


def _map_others(host: Group, own: torch.Tensor, mappings: dict[int, Mapping]) -> None:
    """Give each other rank a descriptor of `own`, and map their blocks into `mappings`, by rank."""
    others = [rank for rank in range(host.size) if rank != host.rank]
    inbox = DescriptorInbox()
    with contextlib.ExitStack() as done:
        done.callback(inbox.close)
        named = list(new_token() + inbox.address.encode())
        rows = host.gather(torch.tensor([named], dtype=torch.uint8), [1] * host.size).tolist()
        inboxes = [(bytes(row[:TOKEN_LEN]), bytes(row[TOKEN_LEN:]).decode()) for row in rows]
        shared = share(own)
        done.callback(os.close, shared.descriptor)
        for rank in others:
            send_descriptors(inboxes[rank][1], inboxes[host.rank][0], [shared.descriptor])
        host.sum(torch.zeros(1))  # all have sent
        for rank in others:
            [descriptor] = inbox.take(inboxes[rank][0])
            try:
                mappings[rank] = map_shared(descriptor, shared.size, own.device, is_writable=True)
            finally:
                os.close(descriptor)
        host.sum(torch.zeros(1))  # all have mapped
