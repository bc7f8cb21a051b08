"""The handoff between two processes on GPUs: pages go from pool to pool, not by way of the host."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_nodes import GpuPool, gpu_client, gpu_prefill, make_pool, poll_until
from handoff_nodes import unit

from baton.kernels.state.pages import page_checksums_ref
from baton.metadata.handoff.schema.schema import make_schema, on_gpu
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.handoff.transports import cuda
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout

TARGET = PoolLayout(num_layers=6, num_kv_heads=4, head_dim=64, dtype="bfloat16")
DRAFT = PoolLayout(num_layers=1, num_kv_heads=2, head_dim=32, dtype="bfloat16")
SCHEMA = on_gpu(make_schema(TARGET, DRAFT, 16, "standalone", draft_topk=1))
NUM_PAGES = 200


def same(ours: GpuPool, targets: Iterable[int], theirs: GpuPool, sources: Iterable[int]) -> bool:
    return all(
        torch.equal(here[:, list(targets)], there[:, list(sources)].to(here.device))
        for here, there in zip(ours.kvs, theirs.kvs, strict=True)
    )


def devices() -> list[Any]:
    """Of prefill and decode."""
    two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
    return [
        ("cuda:0", "cuda:0"),
        *(pytest.param(pair, marks=two) for pair in (("cuda:1", "cuda:0"), ("cuda:0", "cuda:1"))),
    ]


@pytest.mark.parametrize("of_both", devices(), ids="-".join)
@pytest.mark.parametrize("has_checksums", [True, False])
def test_pages_arrive_from_device_to_device(of_both: tuple[str, str], has_checksums: bool) -> None:
    """All bytes of both pools, in chunks, other pages untouched, and no page in either mirror."""
    schema = (
        SCHEMA if has_checksums else on_gpu(make_schema(TARGET, DRAFT, 16, "standalone", draft_topk=1, checksums=False))
    )
    prefills, decodes = of_both
    ours, model = make_pool(schema, NUM_PAGES, device=decodes), make_pool(schema, NUM_PAGES, 1, decodes)
    client = gpu_client(schema, ours)
    sources, targets = [5, 3, 199, 42], [9, 198, 1, 77]
    with gpu_prefill(schema, NUM_PAGES, device=prefills) as prefill:
        prefill.tell("open", unit(), 4)
        client.claim(unit(), prefill.peer, 0, targets)
        prefill.tell("offer", unit(), [0, 1], sources[:2], [1, 1])
        prefill.tell("offer", unit(), [2, 3], sources[2:], [2, 3])
        prefill.tell("finish", unit())
        arrived = poll_until(client, (Arrived, TransferFailed))
        assert isinstance(arrived, Arrived) and arrived.times.transport == "cuda", arrived
        assert same(ours, targets, model, sources)
        others = [page for page in range(NUM_PAGES) if page not in targets]
        assert not any(bool(kv[:, others].any()) for kv in ours.kvs)
        assert not any(memory.pages[:, targets].any() for memory in ours.memory)
        assert prefill.wait_for("TicketEnded")[1] == "acked"
        client.close()


@pytest.mark.parametrize("transport", ["local", "zmq"])
def test_pages_travel_by_way_of_the_host_too(transport: str) -> None:
    ours, model = make_pool(SCHEMA, NUM_PAGES), make_pool(SCHEMA, NUM_PAGES, seed=1)
    client = gpu_client(SCHEMA, ours, transport)
    with gpu_prefill(SCHEMA, NUM_PAGES) as prefill:
        prefill.tell("open", unit(), 3)
        prefill.tell("hand", unit(), [7, 8, 6], 1)
        client.claim(unit(), prefill.peer, 1, [1, 9, 2])
        arrived = poll_until(client, (Arrived, TransferFailed))
        assert isinstance(arrived, Arrived) and arrived.times.transport == transport, arrived
        assert same(ours, [9, 2], model, [8, 6]) and not any(bool(kv[:, 1].any()) for kv in ours.kvs)
        client.close()


def test_checksums_of_device_and_reference_agree() -> None:
    pool, memory, kvs = make_pool(SCHEMA, NUM_PAGES, seed=3)
    pages = [4, 199, 1]
    expected = [
        page_checksums_ref(
            kv.cpu().view(torch.int32), torch.tensor(pages), each.layout.runs[0].block_bytes // 4
        ).flatten(1)
        for kv, each in zip(kvs, memory, strict=True)
    ]
    assert pool.digest(pages) == [row.tobytes() for row in torch.cat(expected, dim=1).numpy()]
    pool.store(pages)
    assert all(
        np.array_equal(each.pages[:, pages], kv[:, pages].cpu().numpy()) for kv, each in zip(kvs, memory, strict=True)
    )
    before = pool.digest([199])[0]
    memory[0].pages[2, 199, 2048 + 5] ^= 1  # layer 2 has 8 blocks a page, as those before it
    changed = pool.load([199])[0]
    assert changed == pool.digest([199])[0]
    assert [at // 8 for at in range(0, len(changed), 8) if changed[at : at + 8] != before[at : at + 8]] == [2 * 8 + 1]


def test_a_page_damaged_on_the_way_is_pulled_again_then_given_up() -> None:
    """The peer's bytes change after they were digested: every pull finds that."""
    ours = make_pool(SCHEMA, NUM_PAGES)
    client = gpu_client(SCHEMA, ours)
    with gpu_prefill(SCHEMA, NUM_PAGES) as prefill:
        prefill.tell("open", unit(), 2)
        prefill.tell("hand", unit(), [3, 4], 1)
        prefill.tell("reuse", [4], 1)  # the count stays: only the checksum can tell
        client.claim(unit(), prefill.peer, 0, [5, 6])
        failed = poll_until(client, (Arrived, TransferFailed))
        assert "checksum of block" in failed.reason and client.num_checksum_failures == 3
        client.close()


def test_a_page_used_again_is_noticed_by_its_generation() -> None:
    ours = make_pool(SCHEMA, NUM_PAGES)
    client = gpu_client(SCHEMA, ours)
    with gpu_prefill(SCHEMA, NUM_PAGES) as prefill:
        prefill.tell("open", unit(), 1)
        prefill.tell("hand", unit(), [3], 4)
        prefill.tell("reuse", [3], 5)
        client.claim(unit(), prefill.peer, 0, [5])
        assert "generation 5 there, 4 offered" in poll_until(client, TransferFailed).reason
        client.close()


def test_nothing_is_written_after_a_drop_however_long_the_device_has_work() -> None:
    """Rounds that still use the pages hold the gather up; forgetting it waits, and then the pages are ours to write."""
    ours, model = make_pool(SCHEMA, NUM_PAGES), make_pool(SCHEMA, NUM_PAGES, seed=1)
    client = gpu_client(SCHEMA, ours)
    targets = list(range(1, 101))
    with gpu_prefill(SCHEMA, NUM_PAGES) as prefill:
        prefill.tell("open", unit("first"), 1)
        prefill.tell("hand", unit("first"), [3], 1)
        client.claim(unit("first"), prefill.peer, 0, [3])
        assert isinstance(poll_until(client, (Arrived, TransferFailed)), Arrived)  # linked and compiled
        for attempt in range(2):
            number = unit(attempt=attempt)
            prefill.tell("open", number, 100)
            prefill.tell("hand", number, targets, 1)
            torch.cuda._sleep(400_000_000)  # cycles, about 0.2 s: what the claim must wait for
            ours.kvs[0][:, 1:101] = 0xEE  # as a round submitted before the claim would
            client.claim(number, prefill.peer, 0, targets)
            deadline = time.monotonic() + 20
            while not client._links.by_epoch or not _is_under_way(client):
                client.poll()
                assert time.monotonic() < deadline
            begun = time.monotonic()
            assert client.poll() == [] and time.monotonic() - begun < 0.1  # polling does not wait
            if attempt == 0:
                client.drop(number, "given up")
                ours.kvs[0][:, 1:101] = 0x77
                for _ in range(20):
                    client.poll()
                torch.cuda.synchronize()
                assert bool((ours.kvs[0][:, 1:101] == 0x77).all())
        assert isinstance(poll_until(client, (Arrived, TransferFailed)), Arrived)
        assert same(ours, targets, model, targets)
        client.close()


def _is_under_way(client: Any) -> bool:
    transport = next(iter(client._links.by_epoch.values())).transport
    return isinstance(transport, cuda.CudaTransport) and bool(transport._launches)


def test_a_dead_peer_fails_its_claims_and_a_new_life_is_mapped_afresh() -> None:
    ours, model = make_pool(SCHEMA, NUM_PAGES), make_pool(SCHEMA, NUM_PAGES, seed=2)
    client = gpu_client(SCHEMA, ours)
    with gpu_prefill(SCHEMA, NUM_PAGES, seed=1, epoch="e1") as first:
        first.tell("open", unit(), 2)
        first.tell("offer", unit(), [0], [3], [1])
        client.claim(unit(), first.peer, 0, [5, 6])
        deadline = time.monotonic() + 20
        while not bool(ours.kvs[0][:, 5].any()):
            client.poll()
            assert time.monotonic() < deadline
        old = next(iter(client._links.by_epoch.values())).transport
        assert first.process.pid is not None
        os.kill(first.process.pid, signal.SIGKILL)
        poll_until(client, TransferFailed)
        assert old._pools.mappings == [] and not client._links.by_epoch  # unmapped at once
    with gpu_prefill(SCHEMA, NUM_PAGES, seed=2, epoch="e2") as second:
        second.tell("open", unit(attempt=1), 1)
        second.tell("hand", unit(attempt=1), [3], 1)
        client.claim(unit(attempt=1), second.peer, 0, [5])
        assert isinstance(poll_until(client, (Arrived, TransferFailed)), Arrived)
        assert same(ours, [5], model, [3])
        client.close()


def test_what_cannot_be_mapped_travels_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, model = make_pool(SCHEMA, NUM_PAGES), make_pool(SCHEMA, NUM_PAGES, seed=1)
    client = gpu_client(SCHEMA, ours)
    real = ours.pool.map

    def damaged(descriptors: Any, *how: Any) -> Any:
        with Path("/dev/null").open() as file:  # a device, but none with memory to map
            return real([file.fileno()] * len(descriptors), *how)

    monkeypatch.setattr(ours.pool, "map", damaged)
    with gpu_prefill(SCHEMA, NUM_PAGES) as prefill:
        prefill.tell("open", unit(), 2)
        prefill.tell("hand", unit(), [3, 4], 1)
        client.claim(unit(), prefill.peer, 0, [5, 6])
        arrived = poll_until(client, (Arrived, TransferFailed))
        assert isinstance(arrived, Arrived) and arrived.times.transport == "local", arrived
        assert same(ours, [5, 6], model, [3, 4])
        client.close()


def test_many_pages_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    schema: HandoffSchema = SCHEMA
    ours, model = make_pool(schema, NUM_PAGES), make_pool(schema, NUM_PAGES, seed=1)
    client = gpu_client(schema, ours)
    monkeypatch.setattr(cuda, "GATHER_BYTES", 1 << 20)
    pages = list(range(1, NUM_PAGES))
    with gpu_prefill(schema, NUM_PAGES) as prefill:
        prefill.tell("open", unit(), len(pages))
        prefill.tell("hand", unit(), pages, 1)
        client.claim(unit(), prefill.peer, 0, pages[::-1])
        assert isinstance(poll_until(client, (Arrived, TransferFailed)), Arrived)
        assert same(ours, pages[::-1], model, pages)
        client.close()


def test_two_nodes_in_one_process_need_no_mapping() -> None:
    ours, theirs = make_pool(SCHEMA, NUM_PAGES), make_pool(SCHEMA, NUM_PAGES, seed=1)
    for _ in range(2):
        mapping = ours.pool.map(*zip(*theirs.pool.shared, strict=True), NUM_PAGES)
        gather = ours.pool.gather(mapping, [3, 4], [7, 9])
        gather.wait()
        assert gather.checksums() == theirs.pool.digest([3, 4]) and same(ours, [7, 9], theirs, [3, 4])
        mapping.close()
