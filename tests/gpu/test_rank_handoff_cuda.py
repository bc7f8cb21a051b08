"""The handoff between nodes with unlike numbers of ranks, whose pools lie on one GPU or on two."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gpu_ranks import gpu_rank, run_gpu_prefill_ranks
from handoff_nodes import named, spin, unit
from rank_nodes import LocalLine, heads_schema

from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.ranks.puller import RankPuller
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.wire.node_info import HandoffSchema, Peer

SOURCES, TARGETS = [2, 5, 3], [9, 1, 4]
# ranks of prefill, ranks of decode, heads of the target, heads of the draft
SIZES = [(1, 2, 4, 2), (2, 1, 4, 2), (2, 2, 4, 2), (2, 3, 6, 1), (2, 4, 2, 4)]


@contextmanager
def prefill_ranks(schema: HandoffSchema, size: int, devices: list[str], spoilt: int = 99) -> Iterator[Peer]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=run_gpu_prefill_ranks, args=(theirs, schema, size, devices, SOURCES, spoilt), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield pipe.recv()
        pipe.send("over")
        process.join(20)
    finally:
        process.kill()
        process.join()


def devices() -> list[Any]:
    """Return the GPUs of the ranks."""
    two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
    return [["cuda:0"], pytest.param(["cuda:0", "cuda:1"], marks=two)]


def pull(schema: HandoffSchema, size: int, peer: Peer, on: list[str], transport: str) -> tuple[Any, list[Any]]:
    """Return the event of a handoff to `size` ranks, and the ranks."""
    ranks = [gpu_rank(schema, Shard(rank, size), "decode", on[rank % len(on)], transport) for rank in range(size)]
    pullers = [RankPuller(rank.end) for rank in ranks[1:]]
    line = LocalLine(pullers) if pullers else None
    client = HandoffClient(ranks[0].end, line=line)
    client.claim(unit(), peer, 0, TARGETS)
    nodes = [client] if line is None else [client, line]
    [event] = spin(nodes, lambda events: named(events, Arrived) + named(events, TransferFailed))
    for each in (client, *pullers):
        each.close()
    return event, ranks


@pytest.mark.parametrize("transport", ["cuda", "zmq"])
@pytest.mark.parametrize("on", devices(), ids="-".join)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_gets_its_heads(sizes: tuple[int, int, int, int], on: list[str], transport: str) -> None:
    num_prefill, num_decode, target, draft = sizes
    schema = heads_schema(target, draft)
    with prefill_ranks(schema, num_prefill, on) as peer:
        event, ranks = pull(schema, num_decode, peer, on[::-1], transport)
    assert isinstance(event, Arrived), event
    assert all(rank.has_arrived(schema, TARGETS, SOURCES) for rank in ranks)
    if transport == "cuda":
        assert not any(pool.pages.any() for rank in ranks for pool in rank.end.memory), "no page was on the host"


@pytest.mark.parametrize("transport", ["cuda", "zmq"])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_one_wrong_byte_of_one_rank_is_caught(spoilt: int, transport: str) -> None:
    schema = heads_schema(6, 6)
    with prefill_ranks(schema, 2, ["cuda:0"], spoilt) as peer:
        event, _ = pull(schema, 3, peer, ["cuda:0"], transport)
    block = 3 * 12 + 6 + (2, 5)[spoilt]  # the last V of the rank's draft, behind three layers of the target
    assert isinstance(event, TransferFailed) and f"checksum of block {block} wrong 3 times" in event.reason, event
