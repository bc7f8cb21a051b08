"""Ranks of nodes with pools on GPUs, and the ranks of a prefill node in a process of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from handoff_nodes import make_row, peer_of, unit
from rank_nodes import LocalLine, part_of, rank_end, whole_pages

from baton.engine.state.cuda_memory import shareable_zeros
from baton.engine.state.cuda_pool import CudaPool
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.page_server import PageServer
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.handoff.schema.schema import on_gpu
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.wire.node_info import HandoffSchema


class GpuRank(NamedTuple):
    """A rank whose pools lie on a GPU. `kvs`: uint8 [num_layers, num_pages, page_layer_bytes] each."""

    end: Endpoint
    kvs: list[torch.Tensor]

    def has_arrived(self, schema: HandoffSchema, targets: Sequence[int], sources: Sequence[int]) -> bool:
        """Return whether the rank has its heads of the pages, and its other pages are zeros, but for the padding."""
        wanted = part_of(schema, whole_pages(schema), self.end.shard)
        for ours, theirs in zip(self.kvs, wanted, strict=True):
            expected = torch.zeros(ours.shape, dtype=torch.uint8)
            expected[:, list(targets)] = torch.from_numpy(theirs)[:, list(sources)]
            if not torch.equal(ours[:, 1:].cpu(), expected[:, 1:]):
                return False
        return True


def gpu_rank(schema: HandoffSchema, shard: Shard, role: str, device: str, *transports: str) -> GpuRank:
    """Return a rank as `rank_end` does, on a GPU. `schema` is that of host pools."""
    end = rank_end(schema, shard, role, transports=transports or ("cuda", "zmq"))
    kvs = [shareable_zeros(pool.pages.shape, torch.uint8, torch.device(device)) for pool in end.memory]
    for kv, pool in zip(kvs, end.memory, strict=True):
        kv.copy_(torch.from_numpy(pool.pages))
        pool.pages[:] = 0  # the mirror has pages only while they travel by way of the host
    torch.cuda.synchronize(device)
    pool = CudaPool(kvs, end.memory, has_checksums=schema.checksum != "none")
    return GpuRank(dataclasses.replace(end, schema=on_gpu(schema), device=pool), kvs)


def run_gpu_prefill_ranks(
    pipe: Connection, schema: HandoffSchema, size: int, devices: Sequence[str], sources: Sequence[int], spoilt: int
) -> None:
    """Run all ranks of a prefill node, rank i on devices[i % len(devices)], until the pipe has a message.

    `spoilt`: a rank, of which one byte of page sources[-1] changes after its digest; beyond the ranks: none.
    """
    ranks = [gpu_rank(schema, Shard(rank, size), "prefill", devices[rank % len(devices)]) for rank in range(size)]
    counted = ranks[0].end.memory[0].where
    others = [PageServer(rank.end, "127.0.0.1", counted) for rank in ranks[1:]]
    line = LocalLine(others) if others else None
    addresses = [other.address for other in others]
    server = HandoffServer(ranks[0].end, "127.0.0.1", lease_s=30.0, line=line, rank_addresses=addresses)
    server.open(unit(), len(sources))
    server.offer(unit(), range(len(sources)), sources, [1] * len(sources), make_row(schema))
    while len(server._book.get(unit()).checksums) < len(sources):  # type: ignore[union-attr]
        if line is not None:
            line.poll()
        server.poll()
    if spoilt < size:
        ranks[spoilt].kvs[-1][-1, sources[-1], -1] ^= 1
        torch.cuda.synchronize(devices[spoilt % len(devices)])
    pipe.send(peer_of(server))
    while not pipe.poll(0.0005):
        server.poll()
        if line is not None:
            line.poll()
    server.close()
    for other in others:
        other.close()
