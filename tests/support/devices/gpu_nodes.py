"""Pools on a GPU, and a prefill node over such a pool in its own process, which obeys orders from a pipe."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import zmq
from handoff_nodes import FINGERPRINTS, make_memory, make_row

from baton.engine.state.cuda_memory import shareable_zeros
from baton.engine.state.cuda_pool import CudaPool
from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.handoff.transports.registry import TRANSPORTS
from baton.metadata.wire.node_info import HandoffSchema, Peer
from baton.metadata.wire.protocol import PROTOCOL_MAX

SPECULATIONS: dict[str, dict[str, Any]] = {  # every kind of drafter, for the demo model
    "none": {"speculative": "none"},
    "ngram": {"speculative": "ngram"},
    "standalone": {"speculative": "standalone"},
    "eagle": {"speculative": "eagle"},
    "eagle tree": {"speculative": "eagle", "draft_steps": 3, "draft_topk": 2},
    "eagle3": {"speculative": "eagle3"},
    "mtp3": {"speculative": "mtp"},
    "frozen-kv-mtp": {"speculative": "frozen-kv-mtp"},
}


class GpuPool(NamedTuple):
    """`kvs` uint8 [num_layers, num_pages, page_layer_bytes] each on the device."""

    pool: CudaPool
    memory: list[PageMemory]
    kvs: list[torch.Tensor]


def make_pool(schema: HandoffSchema, num_pages: int, seed: int | None = None, device: str = "cuda:0") -> GpuPool:
    """Return a pool filled with random bytes of this seed, or with zeros."""
    memory = make_memory(schema, num_pages)
    kvs = [shareable_zeros(pool.pages.shape, torch.uint8, torch.device(device)) for pool in memory]
    if seed is not None:
        generator = torch.Generator(device).manual_seed(seed)
        for kv in kvs:
            kv.random_(0, 256, generator=generator)
    torch.cuda.synchronize(device)
    return GpuPool(CudaPool(kvs, memory, has_checksums=schema.checksum != "none"), memory, kvs)


class Order(NamedTuple):
    """An order to the prefill process, and its arguments.

    open     unit, num_pages
    offer    unit, indices, pages, generations
    finish   unit
    hand     unit, pages, generation: the only offer, with the row; answers when it began and how long it took
    reuse    pages, generation: set the generation, then write another request's bytes on the device
    end      stop the process
    """

    what: str
    args: tuple[Any, ...] = ()


def run_gpu_prefill(
    pipe: Connection, schema: HandoffSchema, num_pages: int, seed: int, epoch: str, device: str, node_id: str
) -> None:
    """Run in the process: send the node's address, then every event, and answer every order with its name."""
    threading.current_thread().name = "prefill"
    pool, memory, kvs = make_pool(schema, num_pages, seed, device)
    end = Endpoint(
        node_id=node_id,
        epoch=epoch,
        schema=schema,
        fingerprints=FINGERPRINTS,
        memory=memory,
        transports=tuple(TRANSPORTS),
        device=pool,
    )
    server = HandoffServer(end, "127.0.0.1", lease_s=5.0)
    pipe.send(server.address)
    poller = zmq.Poller()
    poller.register(server.socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    while True:
        poller.poll(20)
        while pipe.poll():
            order: Order = pipe.recv()
            if order.what == "end":
                server.close()
                return
            pipe.send((order.what, _obey(order, server, memory, kvs)))
        for event in server.poll():
            pipe.send((type(event).__name__, tuple(event)))


def _obey(order: Order, server: HandoffServer, memory: list[PageMemory], kvs: list[torch.Tensor]) -> Any:
    row = make_row(server.end.schema)
    match order:
        case Order("open", (unit, num_pages)):
            server.open(unit, num_pages)
        case Order("offer", (unit, indices, pages, generations)):
            server.offer(unit, indices, pages, generations)
        case Order("finish", (unit,)):
            server.finish(unit, row)
        case Order("hand", (unit, pages, generation)):
            begun = time.perf_counter()
            server.offer(unit, range(len(pages)), pages, [generation] * len(pages), row)
            return begun, time.perf_counter() - begun
        case Order("reuse", (pages, generation)):
            memory[0].generations[list(pages)] = generation
            for kv in kvs:
                kv[:, list(pages)] ^= 0x55
            torch.cuda.synchronize()
        case _:
            raise AssertionError(order)
    return None


class GpuPrefill:
    """The parent's end of the process."""

    def __init__(self, process: Any, pipe: Connection, peer: Peer) -> None:
        self.process, self.pipe, self.peer = process, pipe, peer
        self.events: list[tuple[str, Any]] = []

    def tell(self, what: str, *args: Any) -> Any:
        """Send an order and return the answer."""
        self.pipe.send(Order(what, args))
        while (answer := self.pipe.recv())[0] != what:
            self.events.append(answer)
        return answer[1]

    def post(self, what: str, *args: Any) -> None:
        """Send an order without waiting for the answer."""
        self.pipe.send(Order(what, args))

    def wait_for(self, name: str, client: HandoffClient | None = None, timeout_s: float = 20.0) -> Any:
        """Return the next event or answer of this name. `client` is polled meanwhile and must have no event."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index, event in enumerate(self.events):
                if event[0] == name:
                    return self.events.pop(index)[1]
            events = [] if client is None else client.poll()
            assert not events, events
            if self.pipe.poll(0.001):
                self.events.append(self.pipe.recv())
            assert time.monotonic() < deadline, f"no {name}, only {self.events}"


@contextmanager
def gpu_prefill(
    schema: HandoffSchema, num_pages: int, seed: int = 1, epoch: str = "e0", device: str = "cuda:0"
) -> Iterator[GpuPrefill]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    args = (theirs, schema, num_pages, seed, epoch, device, "p0")
    process = context.Process(target=run_gpu_prefill, args=args, daemon=True)
    process.start()
    theirs.close()
    try:
        address = pipe.recv()
        yield GpuPrefill(process, pipe, Peer("p0", epoch, address, protocol=PROTOCOL_MAX))
    finally:
        with suppress(OSError):  # it may have been killed
            pipe.send(Order("end"))
        process.join(20)
        process.kill()
        process.join()


def gpu_client(schema: HandoffSchema, ours: GpuPool, *transports: str) -> HandoffClient:
    end = Endpoint(
        node_id="d0",
        epoch="d1" * 8,
        schema=schema,
        fingerprints=FINGERPRINTS,
        memory=ours.memory,
        transports=transports or tuple(TRANSPORTS),
        device=ours.pool,
    )
    return HandoffClient(end)


def poll_until(client: HandoffClient, kinds: Any, timeout_s: float = 20.0) -> Any:
    """Poll as a node's loop does until an event of one of the kinds comes, and return it."""
    deadline = time.monotonic() + timeout_s
    while True:
        for event in client.poll():
            if isinstance(event, kinds):
                return event
        assert time.monotonic() < deadline, f"nothing of {kinds} within {timeout_s} s"
        poller = zmq.Poller()
        for socket in client.sockets():
            poller.register(socket, zmq.POLLIN)
        wait_s = client.wait_s()
        poller.poll(100 if wait_s is None else min(100, int(wait_s * 1000)))
